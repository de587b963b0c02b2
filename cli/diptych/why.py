"""`diptych why`: asks the admin ports of this machine's routers about a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import httpx

from diptych.errors import RunError
from diptych.laptop import rundir
from diptych.laptop.pods import LOOPBACK
from diptych.laptop.rundir import RunState
from diptych.router_admin import Get, RouterError, Told, UnknownRequestError, ask_all

TIMEOUT_S: Final = 10.0
T = TypeVar("T")


def ask_here(path: str, kind: type[T]) -> tuple[list[Told[T]], list[str]]:
    """Return the answers of the routers here, and the errors of others. Raises `RunError` if none
    knows the request or none can be asked."""
    states = rundir.running()
    if not states:
        raise RunError("no service runs here; start one with `diptych up`")
    return _ask(states, path, kind)


def ask_service(name: str | None, path: str, kind: type[T]) -> tuple[list[Told[T]], list[str]]:
    """Do the same for the newest service of this name, or of any. Raises `RunError`."""
    return _ask([rundir.find(name)], path, kind)


def _ask(states: list[RunState], path: str, kind: type[T]) -> tuple[list[Told[T]], list[str]]:
    try:
        return ask_all(_routers(states), path, kind)
    except UnknownRequestError as exc:
        raise RunError(f"{exc}; `diptych why` lists the newest requests") from exc
    except RouterError as exc:
        raise RunError(f"no router answers: {exc}") from exc


def _routers(states: list[RunState]) -> Iterator[tuple[str, Get]]:
    """The routers by their pods' names. Services of one name may run here, in one namespace or in
    several; then the port of its API follows the name of each."""
    found = [
        (pod, state.admin_token_file)
        for state in states
        for pod in state.pods
        if pod.role == "router" and "admin" in pod.ports
    ]
    count = Counter(pod.name for pod, _ in found)
    for pod, token_file in found:
        name = pod.name if count[pod.name] == 1 else f"{pod.name}:{pod.ports['http']}"
        url = f"http://{LOOPBACK}:{pod.ports['admin']}"
        yield name, partial(_get, url, Path(token_file))


def _get(url: str, token_file: Path, path: str) -> tuple[int, bytes]:
    try:
        headers = {"Authorization": f"Bearer {token_file.read_text(encoding='utf-8').strip()}"}
        answer = httpx.get(url + path, headers=headers, timeout=TIMEOUT_S, trust_env=False)
    except (httpx.HTTPError, OSError, UnicodeError) as exc:
        raise RouterError(str(exc) or type(exc).__name__) from exc
    return answer.status_code, answer.content
