"""What speaks a vLLM server's side of HTTP and does what a test tells it to.

The pages are vLLM 0.32's, cut down to what a router reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 300.0
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.79e+09
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 128.0
vllm:num_preemptions_total{engine="0",model_name="tiny"} 3.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 300.0
vllm:prompt_tokens_cached_total{engine="0",model_name="tiny"} 128.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 40.0
vllm:iteration_tokens_total_count{engine="0",model_name="tiny"} 17.0
vllm:iteration_tokens_total_sum{engine="0",model_name="tiny"} 340.0
vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="64"} 1.0
"""


def event(*tokens: int, finish: str | None = None, **more: Any) -> bytes:
    """An event of a stream with these tokens."""
    choice = {"index": 0, "finish_reason": finish, "token_ids": list(tokens), **more}
    return data({"request_id": "generate-tokens-x", "usage": None, "choices": [choice]})


def data(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def lent(token: int, params: Any, finish: str = "length") -> bytes:
    """The whole answer of a prefill engine."""
    choice = {"index": 0, "finish_reason": finish, "token_ids": [token]}
    answer = {"request_id": "x", "choices": [choice], "kv_transfer_params": params}
    return json.dumps(answer).encode()


Script = Callable[["Exchange"], Awaitable[None]]


class Exchange:
    """A request that came, and its answer."""

    def __init__(self, request: web.Request, body: dict[str, Any]) -> None:
        self.body = body
        self.response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        self.gone = asyncio.Event()
        """Its client has closed the connection."""
        self._request = request

    async def write(self, *parts: bytes) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        for part in parts:
            await self.response.write(part)

    def cut(self) -> None:
        """Break the connection off."""
        assert self._request.transport is not None
        self._request.transport.abort()

    async def hang(self) -> None:
        """Do nothing until the client goes."""
        await self.write()
        await asyncio.Event().wait()


async def three_tokens(exchange: Exchange) -> None:
    await exchange.write(event(5), event(6), event(7, finish="length"), DONE)


class FakeVllm:
    """Answers at `address` until the block of `serving` ends."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.script: Script = three_tokens
        """How the next requests are answered."""
        self.exchanges: list[Exchange] = []
        self.given_back: list[str] = []
        """The leases that nobody wants any more, in whichever way it was told."""
        self.has_route = True
        """It serves the route of our connector, by which leases are given back."""
        self.metrics = METRICS
        self.models: Any = {"data": [{"id": "tiny", "root": "/m", "max_model_len": 512}]}
        self.health = 200
        self.generate_status = 405
        """The answer to GET."""
        self.times_asked = Counter[str]()
        """Path -> GETs, and calls that give a lease back."""
        self._port = port
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._refuse)
        app.router.add_post("/v1/kv_transfer/reject", self._reject)
        for path, answer in {
            "/inference/v1/generate": lambda: web.Response(status=self.generate_status),
            "/health": lambda: web.Response(status=self.health),
            "/metrics": lambda: web.Response(text=self.metrics),
            "/v1/models": lambda: web.json_response(self.models),
            "/version": lambda: web.json_response({"version": "0.32.0"}),
        }.items():
            app.router.add_get(path, self._page(answer))
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def stop(self) -> None:
        """All connections break; nobody listens."""
        for exchange in self.exchanges:
            if exchange._request.transport is not None:
                exchange.cut()
        if self._runner is not None:
            await self._runner.cleanup()

    def _page(self, answer: Callable[[], web.Response]) -> Any:
        async def serve(request: web.Request) -> web.Response:
            self.times_asked[request.path] += 1
            return answer()

        return serve

    async def _refuse(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["model"] not in [model["id"] for model in self.models["data"]]
        self.times_asked[request.path] += 1
        self.given_back.append(body["kv_transfer_params"]["lease_id"])
        message = f"The model `{body['model']}` does not exist."
        return web.json_response({"error": {"message": message}}, status=404)

    async def _reject(self, request: web.Request) -> web.Response:
        self.times_asked[request.path] += 1
        if not self.has_route:
            raise web.HTTPNotFound
        self.given_back.append((await request.json())["kv_transfer_params"]["lease_id"])
        return web.json_response({"done": True})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        exchange = Exchange(request, await request.json())
        self.exchanges.append(exchange)
        try:
            await self.script(exchange)
        except (asyncio.CancelledError, ConnectionError):
            exchange.gone.set()
            raise
        return exchange.response


@contextlib.asynccontextmanager
async def serving(port: int) -> AsyncIterator[FakeVllm]:
    server = FakeVllm(port)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
