"""The route that our connector adds to vLLM's API server: `POST /v1/kv_transfer/reject`.

It is the one of our own engine's API. vLLM loads this module by its argument `--middleware`, so
nothing has to be installed or allowed besides, and calls `Routes` when its server starts.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any, Final, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych_kv_transfer.connector import with_literals
from diptych_kv_transfer.signing.references import References
from diptych_protocol import UNREADABLE, InvalidRequestError
from diptych_vllm.lending import lease_given_back
from diptych_vllm.settings import ConnectorSettings

log = logging.getLogger(__name__)

PATH: Final = "/v1/kv_transfer/reject"
CONNECTOR: Final = "DiptychConnector"
MAX_BODY_BYTES: Final = 1 << 20
"""A reference to 100,000 blocks has as many."""
BODY_S: Final = 30.0
NOTIFY_S: Final = 10.0
"""vLLM's front-end only hands the call on to its core."""


class Engine(Protocol):
    """What is needed of vLLM's `EngineClient`."""

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: dict[str, Any]
    ) -> None:
        """Tell the connector's scheduler half of a request that will not come."""


class LostRequest(msgspec.Struct):
    """What a body has to have. Whatever else it holds is ignored, so that it may be the very body
    that the decode engine did not get."""

    kv_transfer_params: dict[str, Any]


class Routes:
    """ASGI middleware that does nothing but add the route when the server starts.

    The route is behind all that vLLM has before its own, such as its API keys.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            _add_to(scope["app"])
        await self._app(scope, receive, send)


def _add_to(app: Any) -> None:
    """Give vLLM's application the route, unless its engine does not have our connector."""
    engine: Any = getattr(app.state, "engine_client", None)
    transfer = None if engine is None else engine.vllm_config.kv_transfer_config
    if engine is None or transfer is None or transfer.kv_connector != CONNECTOR:
        log.warning("%s is not served: the engine has not the connector %s", PATH, CONNECTOR)
        return
    settings = with_literals(ConnectorSettings.parse(transfer.kv_connector_extra_config))
    rejections = Rejections(engine, References(settings.key()))
    app.router.routes.insert(0, Route(PATH, rejections.reject, methods=["POST"]))


class Rejections:
    """Gives leases back that nobody will read."""

    def __init__(self, engine: Engine, references: References) -> None:
        self._engine = engine
        self._references = references

    async def reject(self, request: Request) -> Response:
        """Answer a call. It is answered when the engine's core was sent it."""
        try:
            lease = self._lease(await _body_of(request))
        except InvalidRequestError as exc:
            return _error(exc.status, str(exc), "invalid_request_error", exc.param)
        except ClientDisconnect:
            return Response()  # nobody hears it
        # vLLM's core dies of an id that it knows already.
        name = f"rejection-{secrets.token_hex(16)}"
        try:
            async with asyncio.timeout(NOTIFY_S):
                await self._engine.notify_kv_transfer_request_rejected(name, lease)
        except TimeoutError:
            return _error(503, "the engine does not answer; retry later", "server_error")
        except Exception:
            log.exception("a lease was not released")
            return _error(500, "the engine did not take the call", "server_error")
        return Response(b'{"done":true}', media_type="application/json")

    def _lease(self, body: bytes) -> dict[str, Any]:
        """The fields that name the lease, and nothing else of what a client has sent.

        Raises `InvalidRequestError`.
        """
        try:
            lost = msgspec.json.decode(body, type=LostRequest)
        except UNREADABLE as exc:
            raise InvalidRequestError(f"the body cannot be read: {exc}") from exc
        return lease_given_back(self._references, lost.kv_transfer_params)


async def _body_of(request: Request) -> bytes:
    """Raises `InvalidRequestError` for a body that is too long, and `ClientDisconnect`."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    message = f"the body is larger than {MAX_BODY_BYTES} bytes: send only "
                    raise InvalidRequestError(f"{message}kv_transfer_params", status=413)
    except TimeoutError as exc:
        raise InvalidRequestError("the body did not arrive in time", status=408) from exc
    return bytes(body)


def _error(status: int, message: str, kind: str, param: str | None = None) -> Response:
    """In the form that OpenAI's API gives errors."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return Response(msgspec.json.encode({"error": error}), status, media_type="application/json")
