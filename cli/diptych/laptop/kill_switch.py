"""Kills an engine of this run when the router's page requests it, and refuses everybody else.

A browser lets any site send requests to loopback. So a request needs the token of this run, which
only the router passes on, and must come from the page's own site.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from diptych.laptop.pods import LOOPBACK
from diptych.laptop.supervisor import RunningPod
from diptych_frontend.browsers import BrowserGate, BrowserRules
from diptych_frontend.openai.asgi import Boundary
from diptych_frontend.openai.responses import json_response
from diptych_protocol import InvalidRequestError
from diptych_router.telling.page.control import Control

ENGINES: Final = ("prefill", "decode")
DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class KillSwitch:
    """The ASGI app that kills engines, and the address that the router's page needs to reach it."""

    def __init__(self, pods: Sequence[RunningPod], api_url: str) -> None:
        """api_url: base URL of the API, at whose address the page is."""
        self._pods = [pod for pod in pods if pod.spec.role in ENGINES]
        self._origins = origins_of(api_url)
        self._token = secrets.token_urlsafe(24)

    def reached_at(self, port: int) -> Control:
        """The address, including the token."""
        return Control(f"http://{LOOPBACK}:{port}", self._token)

    def app(self) -> ASGIApp:
        router = Router([Route("/engines/{name:path}/kill", self._answer, methods=["POST"])])
        gate = BrowserGate(router, BrowserRules(origins=self._origins))
        return Boundary(gate, on_answer=lambda *_: None)

    async def _answer(self, request: Request) -> Response:
        return json_response({"killed": self._kill(request)})

    def _kill(self, request: Request) -> str:
        """Returns the name of the pod. Raises `InvalidRequestError`."""
        offered = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(offered, f"Bearer {self._token}".encode()):
            raise InvalidRequestError("wrong or missing token; reload the page", status=401)
        pod = self._pod(request.path_params["name"])
        if pod.pid is None:
            raise InvalidRequestError(f"{pod.spec.name} does not run now", status=409)
        pod.kill()
        return pod.spec.name

    def _pod(self, name: str) -> RunningPod:
        for pod in self._pods:
            if name == pod.spec.name:
                return pod
        raise InvalidRequestError(f"no engine here is called {name[:100]!r}", status=404)


def origins_of(api_url: str) -> frozenset[str]:
    """Return the origins by which a browser on this machine may name the API's site on loopback."""
    scheme, _, rest = api_url.partition("://")
    port = int(rest.partition("/")[0].rpartition(":")[2])
    suffix = "" if DEFAULT_PORTS[scheme] == port else f":{port}"
    return frozenset(f"{scheme}://{host}{suffix}" for host in (LOOPBACK, "localhost", "[::1]"))
