"""The operator's own HTTP port: metrics, and what the kubelet asks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from diptych_operator.metrics import OperatorMetrics


@asynccontextmanager
async def serve_probes(host: str, port: int, metrics: OperatorMetrics) -> AsyncIterator[None]:
    """Serve /metrics, /healthz and /readyz while the context lasts.

    Alive is an operator whose loop answers; ready is one that has reached the API server, which it
    has before this is called. Followers are ready too: they are what makes fail-over quick.
    """

    async def expose(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(metrics.registry), headers={"Content-Type": content_type})

    async def fine(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.add_routes(
        [web.get("/metrics", expose), web.get("/healthz", fine), web.get("/readyz", fine)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()
