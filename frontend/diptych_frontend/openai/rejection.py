"""Frees a prefill engine's blocks at once when this server refuses the request they wait for.

A router that prefilled somewhere sends us the decode part with `kv_transfer_params`. If we refuse
it before an engine admits it (bad field, unknown model, no capacity, ...), nobody else would tell
the prefill engine, which would keep the blocks until their lease expires.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych_frontend.openai.asgi import EXCHANGE_KEY, Exchange
from diptych_protocol import EngineClient

logger = logging.getLogger("diptych.openai")

NOTIFY_TIMEOUT_S = 10.0


class RejectionCleanup:
    """The outermost layer, so that it covers every route and every reason to refuse.

    It acts after the answer has gone out, so it neither delays nor changes it. Requests refused
    before their body was read (wrong API key, body too large) are left to the lease's expiry.
    """

    def __init__(self, app: ASGIApp, engine: EngineClient) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
        exchange: Exchange | None = scope.get(EXCHANGE_KEY)
        if exchange is None or exchange.admitted or (exchange.status or 0) < 400:
            return
        params = promised_prefill(exchange.body)
        if params is not None:
            await self._notify(exchange.request_id, params)

    async def _notify(self, request_id: str, params: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(NOTIFY_TIMEOUT_S):
                await self._engine.notify_kv_transfer_request_rejected(request_id, params)
        except (Exception, asyncio.CancelledError) as exc:
            # Cancelled: the server ends. There is nothing left to do here but to say so.
            logger.warning(
                "%s: could not tell the prefill engine that its request was refused "
                "(its lease will expire): %s",
                request_id,
                exc or type(exc).__name__,
            )


def promised_prefill(body: bytes) -> dict[str, Any] | None:
    """The `kv_transfer_params` of a body that announces remotely prefilled blocks, if it does.

    Looks at any JSON object, because the body may have been refused for being otherwise wrong.
    """
    if b"do_remote_prefill" not in body:
        return None
    try:
        request = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    params = request.get("kv_transfer_params") if isinstance(request, dict) else None
    if isinstance(params, dict) and params.get("do_remote_prefill") is True:
        return params
    return None
