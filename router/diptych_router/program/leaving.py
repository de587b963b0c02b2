"""What a router and a route have in common: who may use their API, and how they leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych_frontend.batches_api.service import BatchService
from diptych_frontend.openai.api_keys import ApiKeys
from diptych_frontend.openai.tls import Certificate


class Leaver(Protocol):
    leaving: bool
    """It is about to end, so it is not ready."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """The app of a router or a route. `drain` is what its server does first when it is told to end.

    Kubernetes removes a terminating pod from the endpoints while it already has its SIGTERM, and
    each node learns of it at a different time. So it reports that it is not ready, but
    serves new requests for some seconds more, and asks their clients to use another connection next
    time. No request fails.
    """

    _app: ASGIApp
    _client: Leaver
    _linger_s: float
    _batches: BatchService | None = None
    """Stopped at once, because no user waits for their requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def send_last(message: Message) -> Awaitable[None]:
            if self._client.leaving and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            return send(message)  # not awaited here: that would be one more coroutine a token

        await self._app(scope, receive, send_last)

    async def drain(self) -> None:
        """Fail readiness, and continue to serve until the cluster has had time to notice."""
        self._client.leaving = True
        stopping = [self._batches.close()] if self._batches is not None else []
        await asyncio.gather(asyncio.sleep(self._linger_s), *stopping)


def openness(host: str, keys: ApiKeys | None, certificate: Certificate | None) -> str:
    """Who may use the API, in a line."""
    who = "open to whoever reaches it" if keys is None else f"{len(keys.names)} API keys"
    return f"the API at {host}: {who}, {'TLS' if certificate is not None else 'no TLS'}"
