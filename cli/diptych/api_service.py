"""Finds the service that a command talks to: the one that is named, or the newest here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import httpx

from diptych.errors import BadInputError, RunError
from diptych.laptop import rundir
from diptych.laptop.rundir import options

TIMEOUT: Final = httpx.Timeout(10.0)


@dataclass(frozen=True, slots=True)
class Service:
    """The address of a service, and how to reach it."""

    url: str
    """Base URL of the OpenAI API, ending in /v1."""
    model: str
    client: dict[str, Any]
    """Keyword arguments of an httpx client."""


def find_service(url: str | None, model: str | None, api_key: str | None = None) -> Service:
    """Return base URL and model name: those given, else those of the newest running service.

    Raises `BadInputError` and `RunError`.
    """
    if url is None:
        states = [state for state in rundir.running() if state.ready]
        if not states:
            raise RunError("no service runs here; start one with `diptych up`, or give --url")
        found = states[0]
        return Service(found.url, model or found.model, options(found))
    base = _checked(url).rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    client = options(api_key=api_key)
    return Service(base, model or _first_model(base, client), client)


def _checked(url: str) -> str:
    """Return a URL as it is. Raises `BadInputError` for one that no API can have."""
    try:
        read = httpx.URL(url)
        may_be = read.scheme in ("http", "https") and read.host and (read.port or 0) < 1 << 16
    except (httpx.InvalidURL, UnicodeError):
        may_be = False
    if not may_be:
        raise BadInputError(f"{url!r} is no address of an API, such as http://127.0.0.1:8000/v1")
    return url


def _first_model(base: str, client: dict[str, Any]) -> str:
    try:
        response = httpx.get(f"{base}/models", timeout=TIMEOUT, **client)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as exc:
        raise RunError(f"{base} is out of reach: {exc}") from exc
    except (ValueError, LookupError, TypeError) as exc:
        raise RunError(f"{base}/models does not list a model; give --model") from exc
