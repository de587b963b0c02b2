"""How commands reach an API on this machine: with its key, and trusting its certificate."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Final

import httpx

from diptych.laptop.rundir import RunState

METRICS_TIMEOUT_S: Final = 2.0


def read_metrics(state: RunState) -> str:
    """Return a service's /metrics from its router. Raises `httpx.HTTPError` and `OSError`."""
    url = f"{state.url.removesuffix('/v1')}/metrics"
    response = httpx.get(url, timeout=METRICS_TIMEOUT_S, **options(state))
    response.raise_for_status()
    return response.text


def options(state: RunState | None = None, api_key: str | None = None) -> dict[str, Any]:
    """Return keyword arguments for an httpx client or call.

    A service on this machine has its own key and certificate. Others need `api_key`, and a
    certificate that the system trusts. The key of a service that has just ended is empty.
    """
    key, trust = api_key, ssl.create_default_context()
    if state is not None and state.certificate:
        # It is that very one, whoever signed it and whatever name it is for.
        trust.load_verify_locations(state.certificate)
        trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        trust.check_hostname = False
    if state is not None:
        key = _read(Path(state.key_file)) if state.key_file else None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return {"trust_env": False, "verify": trust, "headers": headers}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
