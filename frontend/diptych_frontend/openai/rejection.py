"""Frees a prefill engine's blocks at once if the request that they wait for is refused.

A router that prefilled somewhere sends us the decode part with `kv_transfer_params`. If we refuse
it before an engine admits it (bad field, unknown model, no capacity, ...), nobody else would tell
the prefill engine, which would keep the blocks until their lease expires.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from diptych_frontend.openai.exchange import Exchange, decode_body, exchange_of, send_bytes
from diptych_frontend.openai.promised_prefill import promised_prefill
from diptych_frontend.openai.request_workers import RequestWorkers
from diptych_protocol import EngineClient, EngineOverloadedError

logger = logging.getLogger("diptych.openai")

NOTIFY_TIMEOUT_S = 10.0


async def give_back(engine: EngineClient, exchange: Exchange) -> None:
    """Tell the prefill engine of a request that was refused.

    It acts after the answer was sent, so it neither delays nor changes it. Requests refused before
    any of their body was read (wrong API key, a body much too large) are left until the lease
    expires.
    """
    params = exchange.promise or promised_prefill(exchange.body)
    if params is None:
        return
    try:
        async with asyncio.timeout(NOTIFY_TIMEOUT_S):
            await engine.notify_kv_transfer_request_rejected(exchange.request_id, params)
    except (Exception, asyncio.CancelledError) as exc:
        # Cancelled: the server ends. There is nothing left to do here but to say so.
        logger.warning(
            "%s: could not tell the prefill engine that its request was refused "
            "(its lease will expire): %s",
            exchange.request_id,
            exc or type(exc).__name__,
        )


class LostRequest(msgspec.Struct):
    """Body of POST /v1/kv_transfer/reject. Other fields are ignored, so that the body of the lost
    request may be sent unchanged."""

    kv_transfer_params: dict[str, Any]
    """As the prefill engine sent and signed them. Their holder may give its blocks back."""
    request_id: str | None = None


class RejectRoute:
    """The ASGI endpoint for a router that tells a prefill engine itself, for example because it
    cannot reach the decode engine. Decode engines accept it too, and pass it on."""

    def __init__(self, engine: EngineClient, workers: RequestWorkers) -> None:
        self._engine = engine
        self._workers = workers
        self._decoder = msgspec.json.Decoder(LostRequest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        read = partial(decode_body, scope, exchange.body, self._decoder)
        lost = await self._workers.read(scope, exchange.body, read)
        request_id = lost.request_id or exchange.request_id
        try:
            async with asyncio.timeout(NOTIFY_TIMEOUT_S):
                await self._engine.reject_kv_transfer(request_id, lost.kv_transfer_params)
        except TimeoutError as exc:
            raise EngineOverloadedError("the engine does not answer; retry later") from exc
        await send_bytes(send, 200, b'{"done":true}', [])
