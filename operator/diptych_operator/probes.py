"""The operator's HTTP port for metrics and the kubelet's probes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from diptych_operator.metrics import OperatorMetrics

Handler = Callable[[web.Request], Awaitable[web.Response]]


@asynccontextmanager
async def serve_probes(
    host: str,
    port: int,
    metrics: OperatorMetrics,
    faults: Callable[[], Sequence[str]],
    unready: Callable[[], Sequence[str]],
) -> AsyncIterator[None]:
    """Serve /metrics, /healthz and /readyz while the context lasts (`WatchLiveness`).

    Replicas that stand by are ready, so that fail-over is quick.
    """

    async def expose(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(metrics.registry), headers={"Content-Type": content_type})

    def tell(wrong: Callable[[], Sequence[str]]) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            words = wrong()
            status = 503 if words else 200
            return web.Response(text="\n".join(words or ["ok"]) + "\n", status=status)

        return answer

    app = web.Application()
    app.add_routes(
        [
            web.get("/metrics", expose),
            web.get("/healthz", tell(faults)),
            web.get("/readyz", tell(unready)),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()
