"""Ends a router in a cluster without any failed request.

Kubernetes removes a terminating pod from the endpoints while it already has its SIGTERM, and each
node learns of it at a different time. So the router reports that it is not ready, but serves new
requests for some seconds more, and asks their clients to use another connection next time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych_frontend.batches_api.service import BatchService
from diptych_router.requests.pool_client import PoolClient


class Leaving:
    """The router's app. `drain` is what its server does first when it is told to end."""

    def __init__(
        self,
        app: ASGIApp,
        client: PoolClient,
        linger_s: float,
        batches: BatchService | None = None,
    ) -> None:
        """batches: stopped at once, because no user waits for their requests."""
        self._batches = batches
        self._app = app
        self._client = client
        self._linger_s = linger_s

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
