"""Finds the service that a command talks to: the one that is named, or the newest here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import httpx

from diptych.errors import RunError
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
    """Return base URL and model name: those given, else those of the newest running service."""
    if url is None:
        states = [state for state in rundir.running() if state.ready]
        if not states:
            raise RunError("no service runs here; start one with `diptych up`, or give --url")
        found = states[0]
        return Service(found.url, model or found.model, options(found))
    base = url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    client = options(api_key=api_key)
    return Service(base, model or _first_model(base, client), client)


def _first_model(base: str, client: dict[str, Any]) -> str:
    try:
        response = httpx.get(f"{base}/models", timeout=TIMEOUT, **client)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise RunError(f"{base} is out of reach: {exc}") from exc
    except (ValueError, LookupError, TypeError) as exc:
        raise RunError(f"{base}/models does not list a model; give --model") from exc
