"""Promises of a service, and the turns of its API keys, behind real routers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio
from engine_kit.executor import PACED
from free_ports import free_port
from service_kit import (
    LIGHT,
    all_usable,
    engine_config,
    generate,
    importing_support,
    routing,
    start_engine,
)
from waits import PATIENCE_S

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_protocol import (
    EngineOverloadedError,
    RequestOutputKind,
    SamplingParams,
    Slo,
    TenantOverloadedError,
    TextPrompt,
)
from diptych_protocol.block_hashes import salt_of_tenant
from diptych_router.requests.pool_client import PoolClient
from diptych_router.telling.admin_port import router_report
from diptych_router.telling.metrics import RouterMetrics

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROWS = 2
LONG = "word " * 500


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(smollm2: str, keys_dir: Path) -> AsyncIterator[tuple[AsyncLLM, str]]:
    """It computes two requests at once."""
    started = await start_engine(engine_config("decode-0", smollm2, max_num_seqs=ROWS), keys_dir)
    yield started
    started[0].shutdown()


def alone(
    model: str, keys_dir: Path, decode: str, **settings: object
) -> AbstractAsyncContextManager[PoolClient]:
    """A router of one decode engine; nobody answers where a prefill engine could be."""
    nobody = f"127.0.0.1:{free_port()}"
    return routing(model, keys_dir, [nobody], [decode], **settings)


async def ask(client: PoolClient, prompt: str, max_tokens: int, tenant: str) -> None:
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    async for _ in client.generate(prompt, params, "asked", tenant=tenant):
        pass


async def until_rates_are_known(client: PoolClient) -> None:
    """Have the engine work until its reports teach the router how long a token of a prompt takes.

    A few reports may not: where one step of a busy machine was slower than another with a prompt,
    prompts seem to take no time. No engine of one thread computes 20,000 tokens in a second.
    """
    [link] = client.pools.of("decode")
    words = "word " * 100
    async with asyncio.timeout(PATIENCE_S):
        for number in count():
            await client.refresh_stats()
            await until_queue(client, lambda tokens: tokens == 0)
            if link.row["told_steps"] and link.row["prompt_token_s"] > 5e-5:
                return
            await generate(client, f"Lesson {number}: {words}", max_tokens=2)


async def until_queue(client: PoolClient, is_right: Callable[[int], bool]) -> None:
    """Wait until the router knows of such a number of prompt tokens that wait at its engine."""
    [link] = client.pools.of("decode")
    async with asyncio.timeout(PATIENCE_S):
        while not is_right(link.row.queue()[0]):
            await client.refresh_stats()


async def cached_tokens(client: PoolClient, prompt: str, tenant: str, salt: str = "") -> int | None:
    """Tokens of a prompt that an engine remembered for a key."""
    params = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
    asked: TextPrompt = {"prompt": prompt}
    if salt:
        asked["cache_salt"] = salt
    async for output in client.generate(asked, params, "asked", tenant=tenant):
        return output.num_cached_tokens
    raise AssertionError("no answer")


@pytest.mark.parametrize("kept_apart", [False, True])
async def test_a_key_finds_what_another_has_left_unless_caches_are_kept_apart(
    engine: tuple[AsyncLLM, str], smollm2: str, keys_dir: Path, kept_apart: bool
) -> None:
    prompt = f"A secret of alice, {kept_apart}: " + "word " * 100
    async with alone(smollm2, keys_dir, engine[1], cache_per_key=kept_apart) as client:
        await all_usable(client, 1)
        assert not await cached_tokens(client, prompt, "alice")
        assert bool(await cached_tokens(client, prompt, "bob")) is not kept_apart
        assert await cached_tokens(client, prompt, "alice")
        forged = salt_of_tenant("alice", None)
        assert not await cached_tokens(client, prompt, "bob", forged), "a salt opens nothing"


@pytest.mark.parametrize(
    ("tenant", "error"), [("", EngineOverloadedError), ("alice", TenantOverloadedError)]
)
async def test_requests_that_would_be_late_are_refused_at_once_and_counted(
    engine: tuple[AsyncLLM, str],
    smollm2: str,
    keys_dir: Path,
    tenant: str,
    error: type[EngineOverloadedError],
) -> None:
    """Any wait is longer than a millisecond; 16 prompts wait for the end of two long answers."""
    settings = {"policy": "prefix_aware", "slo": Slo(ttft_ms=1, inter_token_ms=60_000)}
    async with (
        alone(smollm2, keys_dir, engine[1]) as patient,
        alone(smollm2, keys_dir, engine[1], **settings) as client,
    ):
        for router in (patient, client):
            await all_usable(router, 1)
        await until_rates_are_known(client)
        before = sum(client.table.promises.counts.values())
        queue = [
            asyncio.create_task(ask(patient, f"{tenant} {n} {LONG}", 1000, tenant))
            for n in range(16 + ROWS)
        ]
        await until_queue(client, lambda tokens: tokens >= 16 * 500)
        asked = (ask(client, f"{number} {LONG}", 2, tenant) for number in range(3))
        for refusal in await asyncio.gather(*asked, return_exceptions=True):
            assert type(refusal) is error
            assert refusal.retry_after_s >= 1
        for task in queue:
            task.cancel()
        await asyncio.gather(*queue, return_exceptions=True)
        await until_queue(client, lambda tokens: tokens == 0)
        await ask(client, "After that there is room.", 2, tenant)
        counts = {
            (each.promise, each.outcome): each.requests for each in router_report(client).promises
        }
        assert counts["first_token", "refused"] == 3
        assert counts["inter_token", "kept"] >= 2
        assert sum(client.table.promises.counts.values()) > before + 3
        metrics = ServerMetrics("m")
        metrics.registry.register(RouterMetrics(client))
        labels = 'outcome="refused",pool="decode",promise="first_token"'
        line = f'diptych:promises_total{{model_name="{client.model_name}",{labels}}} 3.0'
        assert line in metrics.exposition("")[0].decode()


async def test_a_key_with_many_requests_at_one_router_leaves_turns_to_a_key_at_another(
    engine: tuple[AsyncLLM, str], smollm2: str, keys_dir: Path
) -> None:
    """The engine's queue is one for both routers, and its reports tell each whose requests wait."""
    async with (
        alone(smollm2, keys_dir, engine[1], policy="prefix_aware") as first,
        alone(smollm2, keys_dir, engine[1], policy="prefix_aware") as second,
    ):
        for router in (first, second):
            await all_usable(router, 1)
            await until_rates_are_known(router)
        greedy = [asyncio.create_task(ask(first, f"{n} {LONG}", 8, "greedy")) for n in range(40)]
        async with asyncio.timeout(PATIENCE_S):
            while (await engine[0].refresh_stats()).num_waiting < 30:
                await asyncio.sleep(0.01)
            await second.refresh_stats()
        [link] = second.pools.of("decode")
        queued, of_tenants = link.row.queue()
        assert of_tenants["greedy"] == queued > 0
        done_before = sum(task.done() for task in greedy)
        await ask(second, "One short question.", 2, "modest")
        done = sum(task.done() for task in greedy) - done_before
        assert done <= 3 * ROWS, "those that were running, and those that began meanwhile"
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)


async def test_a_more_urgent_request_at_one_router_goes_before_those_of_another(
    smollm2: str, keys_dir: Path
) -> None:
    own = {"max_num_seqs": 1, "scheduling_policy": "priority", "executor_class": PACED}
    with importing_support():
        core, address = await start_engine(engine_config("decode-1", LIGHT, **own), keys_dir)
    try:
        async with (
            alone(smollm2, keys_dir, address) as first,
            alone(smollm2, keys_dir, address) as second,
        ):
            for router in (first, second):
                await all_usable(router, 1)
            ends: list[str] = []

            async def ask_with(router: PoolClient, name: str, priority: int) -> None:
                params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
                outputs = router.generate(name, params, name, priority=priority)
                async for _ in outputs:
                    pass
                ends.append(name)

            ordinary = [asyncio.create_task(ask_with(first, f"ordinary {n}", 0)) for n in range(10)]
            async with asyncio.timeout(PATIENCE_S):
                while (await core.refresh_stats()).num_waiting < 5:
                    await asyncio.sleep(0.01)
            await ask_with(second, "urgent", -1)
            assert ends.index("urgent") <= 3, "only those that had begun end before it"
            await asyncio.gather(*ordinary)
    finally:
        core.shutdown()
