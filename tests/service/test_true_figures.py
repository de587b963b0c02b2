"""Usage, metrics and the engines' own counts tell the same story of what was computed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_kit.executor import PACED
from served import serve_http
from service_kit import LIGHT, Core, all_usable, cores, engine_config, link_of, routing
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_router.requests.pool_client import PoolClient

LENGTH = 96
"""Tokens of an answer during which something happens."""
ABORTED = "diptych:request_success_total"
LABELS = {"model_name": "smollm2", "finished_reason": "abort"}


@pytest.fixture(scope="module")
def engines(keys_dir: Path) -> Iterator[list[Core]]:
    """One prefill engine and two for decode."""
    names = ("prefill-0", "decode-0", "decode-1")
    configs = [engine_config(name, LIGHT, executor_class=PACED) for name in names]
    with cores(keys_dir, *configs) as started:
        yield started


@dataclass
class Counts:
    """Totals that grow as requests are served."""

    prompt: float
    cached: float
    generated: float
    computed: int
    """Prompt tokens that any engine computed."""

    def since(self, before: Counts) -> tuple[float, float, float, int]:
        return (
            self.prompt - before.prompt,
            self.cached - before.cached,
            self.generated - before.generated,
            self.computed - before.computed,
        )


@dataclass
class Service:
    client: PoolClient
    metrics: ServerMetrics
    http: httpx.AsyncClient
    decode: list[Core]

    async def counts(self) -> Counts:
        read = self.metrics.registry.get_sample_value
        labels = {"model_name": "smollm2"}
        prompt, cached, generated = (
            read(f"diptych:{name}_total", labels) or 0.0
            for name in ("prompt_tokens", "prompt_tokens_cached", "generation_tokens")
        )
        up = [link for link in self.client.pools.links.values() if link.up]
        stats = [await link.refresh_stats() for link in up]
        computed = sum(each.prompt_tokens_computed for each in stats)
        return Counts(prompt, cached, generated, computed)

    async def complete(self, prompt: str, **changes: Any) -> tuple[str, dict[str, Any]]:
        """The text of the first answer, and the usage."""
        body = {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": 8, **changes}
        answer = (await self.http.post("/v1/completions", json=body)).raise_for_status().json()
        return answer["choices"][0]["text"], answer["usage"]

    async def stream(self, prompt: str, midway: Callable[[Core], Awaitable[None]]) -> Any:
        """The usage of a stream during which something happens to the engine that decodes it."""
        body = {
            "model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": LENGTH,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        events = [""]
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            name = answer.headers["x-diptych-decode"]
            async for line in answer.aiter_lines():
                events += [line] if line.startswith("data: {") else []
                if len(events) == 8:
                    await midway(next(c for c in self.decode if c.config.engine_id == name))
        return json.loads(events[-1].removeprefix("data: "))["usage"]


@asynccontextmanager
async def serving(smollm2: str, keys_dir: Path, engines: list[Core]) -> AsyncIterator[Service]:
    prefill, *decode = engines
    addresses = [core.address for core in decode]
    async with routing(smollm2, keys_dir, [prefill.address], addresses) as client:
        await all_usable(client, len(engines))
        metrics = ServerMetrics(client.model_name, client.stats_by_engine)
        app = build_app(client, metrics=metrics)
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(
            serve_http(
                app,
                "127.0.0.1",
                0,
                on_ready=lambda host, port: ready.set_result(f"http://{host}:{port}"),
            )
        )
        try:
            url = await asyncio.wait_for(ready, PATIENCE_S)
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
                yield Service(client, metrics, http, decode)
        finally:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)


def cached_of(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def test_cached_tokens_are_those_that_nobody_computed(
    smollm2: str, keys_dir: Path, engines: list[Core]
) -> None:
    """A new prompt, again, as the beginning of a conversation whose KV decode has, and n times."""
    story = "The lighthouse keeper climbed the stairs every evening, and counted ships. " * 6
    async with serving(smollm2, keys_dir, engines) as service:
        text, _ = await checked(service, story, cached=0)
        block = 16
        length = len(service.client.renderer.render_prompt(story)["prompt_token_ids"])
        await checked(service, story, cached=(length - 1) // block * block)
        await checked(service, story + text + " And then", cached=length // block * block)
        await checked(service, "Another one: " + story, cached=0, n=3, temperature=1.0)


async def checked(
    service: Service, prompt: str, cached: int, **changes: Any
) -> tuple[str, dict[str, Any]]:
    """Complete, and compare the usage with metrics and with what engines computed."""
    before = await service.counts()
    text, usage = await service.complete(prompt, **changes)
    told = usage["prompt_tokens"], cached_of(usage), usage["completion_tokens"]
    assert cached_of(usage) == cached
    computed = usage["prompt_tokens"] - cached
    counted = (await service.counts()).since(before)
    if "n" not in changes:
        assert counted == (*told, computed)
        return text, usage
    # Further answers find the blocks of the first one, and compute what no block is full of.
    assert counted[:3] == told
    assert computed <= counted[3] <= computed + (changes["n"] - 1) * 16
    return text, usage


@pytest.mark.parametrize("n", [1, 2])
async def test_what_was_computed_for_a_client_that_left_is_counted(
    n: int, smollm2: str, keys_dir: Path, engines: list[Core], eventually: Any
) -> None:
    """It waited for a whole answer, and saw nothing of it; its key is charged all the same."""
    prompt = f"Once upon a time there was somebody who asked {n} times and did not wait. " * 3
    async with serving(smollm2, keys_dir, engines) as service:
        links = [link_of(service.client, core) for core in service.decode]

        async def is_decoded() -> bool:
            return sum([(await link.refresh_stats()).num_running for link in links]) == n

        before = await service.counts()
        changes = {"max_tokens": 5 * LENGTH, "ignore_eos": True, "temperature": 1.0, "n": n}
        asking = asyncio.create_task(service.complete(prompt, **changes))
        await eventually(is_decoded)
        asking.cancel()
        await eventually(lambda: service.metrics.registry.get_sample_value(ABORTED, LABELS) == n)
        prompt_tokens, _, generated, _ = (await service.counts()).since(before)
        own = service.client.renderer.render_prompt(prompt)["prompt_token_ids"]
        assert prompt_tokens == len(own)
        assert n <= generated < n * 5 * LENGTH


@pytest.mark.parametrize("what", ["moves", "is lost"])
async def test_cached_tokens_stay_what_they_were_when_a_stream(
    what: str, smollm2: str, keys_dir: Path, engines: list[Core]
) -> None:
    """The engine that goes on has received or computed the prompt: no prefix cache gave it."""
    prompt = f"What {what} goes on elsewhere, and nobody notices that it has happened. " * 6
    async with serving(smollm2, keys_dir, engines) as service:
        victims: list[Core] = []

        async def midway(core: Core) -> None:
            victims.append(core)
            if what == "moves":
                await link_of(service.client, core).client.call("drain")
            else:
                await asyncio.to_thread(core.kill)

        before = await service.counts()
        usage = await service.stream(prompt, midway)
        after = await service.counts()
        assert victims
        assert (cached_of(usage), usage["completion_tokens"]) == (0, LENGTH)
        counted = after.since(before)
        assert counted[:3] == (usage["prompt_tokens"], 0, LENGTH)
        if what == "moves":
            assert counted[3] == usage["prompt_tokens"]
    for core in victims:
        core.kill()
        core.start()
