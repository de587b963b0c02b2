"""Kills an engine of this run when its page says so, and takes orders from nobody else.

A browser lets any site send requests to loopback. So an order needs the token of this run, which
only the router passes on, and comes from an address of the page: the header `Origin`, which no
script can set.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from diptych.laptop.pods import LOOPBACK
from diptych.laptop.supervisor import RunningPod
from diptych_frontend.openai.asgi import Boundary
from diptych_frontend.openai.errors import ErrorBody, error_answer
from diptych_protocol import InvalidRequestError
from diptych_router.page.control import Control

ENGINES: Final = ("prefill", "decode")
DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class KillSwitch:
    """The app of its port, and what the router's page needs to reach it."""

    def __init__(self, pods: Sequence[RunningPod], api_url: str) -> None:
        """api_url: base URL of the API, at whose address the page is."""
        self._pods = [pod for pod in pods if pod.spec.role in ENGINES]
        self._origins = origins_of(api_url)
        self._token = secrets.token_urlsafe(24)

    def reached_at(self, port: int) -> Control:
        """With the token."""
        return Control(f"http://{LOOPBACK}:{port}", self._token)

    def app(self) -> ASGIApp:
        path = "/engines/{name:path}/kill"
        router = Router([Route(path, self._answer, methods=["POST", "OPTIONS"])])
        return Boundary(router, on_answer=lambda *_: None, access_log="off")

    async def _answer(self, request: Request) -> Response:
        origin = request.headers.get("origin", "")
        if origin not in self._origins:
            raise InvalidRequestError("only the page of this service may say so", status=403)
        shared = {"access-control-allow-origin": origin, "vary": "origin"}
        if request.method == "OPTIONS":
            allowed = {
                "access-control-allow-methods": "POST",
                "access-control-allow-headers": "authorization",
            }
            return Response(status_code=204, headers=shared | allowed)
        try:
            killed = self._kill(request)
        except InvalidRequestError as exc:  # the page may read why
            refusal = error_answer(exc, "")
            body = msgspec.json.encode(ErrorBody(refusal.detail))
            return Response(body, refusal.status, shared, "application/json")
        body = msgspec.json.encode({"killed": killed})
        return Response(body, headers=shared, media_type="application/json")

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
        """By its name, or by the address of an engine that has no name, as one of vLLM's."""
        for pod in self._pods:
            if name in (pod.spec.name, f"{LOOPBACK}:{pod.spec.ports.get('http')}"):
                return pod
        raise InvalidRequestError(f"no engine here is called {name[:100]!r}", status=404)


def origins_of(api_url: str) -> frozenset[str]:
    """How a browser of this machine may name the site of an API on loopback."""
    scheme, _, rest = api_url.partition("://")
    port = int(rest.partition("/")[0].rpartition(":")[2])
    suffix = "" if DEFAULT_PORTS[scheme] == port else f":{port}"
    return frozenset(f"{scheme}://{host}{suffix}" for host in (LOOPBACK, "localhost", "[::1]"))
