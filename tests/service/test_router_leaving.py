"""Engines leave, are killed, or vanish, and no stream breaks: real engines."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_kit.core import BATCHED
from engine_kit.executor import PACED
from service_kit import (
    LIGHT,
    Core,
    Streaming,
    all_usable,
    cores,
    engine_config,
    generate,
    healthy,
    link_of,
    routing,
)

from diptych_router.engines.engine_link import EngineLink
from diptych_router.requests.pool_client import PoolClient
from diptych_router.telling.admin_port import router_report

PROMPTS = [
    f"Chapter {number}. The lighthouse keeper climbed the stairs every evening, and "
    for number in ("one", "two")
]
LENGTH = 64
SLOW: dict[str, Any] = {"executor_class": PACED, "weight_packing": BATCHED}


@dataclass
class Fleet:
    """One prefill engine and two for decode."""

    prefill: Core
    decode: list[Core]
    spent: list[Core] = field(default_factory=list)
    """Engines that the next test cannot use; it gets new ones in their places."""


@pytest.fixture(scope="module")
def engines(keys_dir: Path) -> Iterator[Fleet]:
    names = ("prefill-0", "decode-0", "decode-1")
    configs = [engine_config(name, LIGHT, **SLOW) for name in names]
    with cores(keys_dir, *configs) as (prefill, *decode):
        yield Fleet(prefill, decode)


@pytest.fixture
def fleet(engines: Fleet) -> Fleet:
    for core in engines.spent:
        core.kill()
        core.start()
    engines.spent.clear()
    return engines


@pytest.fixture(scope="module")
def known() -> dict[str, list[int]]:
    """Answers that are known already, by prompt."""
    return {}


async def streams_at(client: PoolClient, link: EngineLink, eventually: Any) -> list[Streaming]:
    """Streams that decode at one engine, because its twin looks busy when they begin."""
    twins = [x for x in client.pools.of("decode") if x is not link]
    for twin in twins:
        twin.row["open_tokens"] += 1_000_000
    streams = [Streaming(client, prompt, LENGTH) for prompt in PROMPTS]
    await eventually(lambda: all(len(s.token_ids) > 5 for s in streams))
    for twin in twins:
        twin.row["open_tokens"] -= 1_000_000
    return streams


async def expected(client: PoolClient, known: dict[str, list[int]]) -> list[list[int]]:
    """What engines that nobody disturbs answer."""
    for prompt in PROMPTS:
        if prompt not in known:
            output = await generate(client, prompt, max_tokens=LENGTH, ignore_eos=True)
            known[prompt] = output.outputs[0].token_ids
    return list(known.values())


def leases_held(link: EngineLink) -> int:
    hinge = link.stats.kv_transfer
    assert hinge is not None
    return hinge.leases_held


@pytest.mark.slow
async def test_a_draining_engine_hands_its_streams_to_its_twin(
    smollm2: str,
    keys_dir: Path,
    fleet: Fleet,
    known: dict[str, list[int]],
    eventually: Any,
) -> None:
    fleet.spent += fleet.decode
    async with routing(
        smollm2, keys_dir, [fleet.prefill.address], [core.address for core in fleet.decode]
    ) as client:
        await all_usable(client, 3)
        wanted = await expected(client, known)
        leaving, twin = (link_of(client, core) for core in fleet.decode)
        streams = await streams_at(client, leaving, eventually)
        before = await twin.refresh_stats()
        await leaving.client.call("drain")
        await eventually(lambda: leaving.stats.draining)
        assert all(len(stream.token_ids) < LENGTH for stream in streams)
        assert [await stream.done() for stream in streams] == wanted
        after = await twin.refresh_stats()
        assert after.prompt_tokens_computed == before.prompt_tokens_computed, "KV came over"
        assert after.remote_kv_tokens > before.remote_kv_tokens
        await leaving.refresh_stats()
        await eventually(lambda: leases_held(leaving) == 0)
        assert leaving.stats.num_running == 0
        assert leaving.open_tokens == twin.open_tokens == 0
        output = await generate(client, "Anybody new?")
        assert output.metrics["decode"] == twin.name
        report = {engine.engine_id: engine for engine in router_report(client).engines}
        assert report["decode-0"].draining
        assert not report["decode-0"].usable

        # The twin leaves too, and nobody is left to take over: what runs there ends there.
        (last, *_) = await streams_at(client, twin, eventually)
        await twin.client.call("drain")
        await eventually(lambda: twin.stats.draining)
        assert client.why_not_ready()
        assert await last.done() == wanted[0]


@pytest.mark.slow
async def test_what_only_waits_at_a_draining_engine_begins_again_elsewhere(
    smollm2: str,
    keys_dir: Path,
    fleet: Fleet,
    known: dict[str, list[int]],
    eventually: Any,
) -> None:
    """One stream runs, the other has its KV there and waits for its turn: nothing to hand off."""
    wide = fleet.decode[0]
    config = engine_config("narrow-0", LIGHT, max_num_seqs=1, **SLOW)
    with cores(keys_dir, config) as (narrow,):
        async with routing(
            smollm2, keys_dir, [fleet.prefill.address], [narrow.address, wide.address]
        ) as client:
            await all_usable(client, 3)
            wanted = await expected(client, known)
            leaving, twin = link_of(client, narrow), link_of(client, wide)
            twin.row["open_tokens"] += 1_000_000
            streams = [Streaming(client, prompt, LENGTH) for prompt in PROMPTS]
            await eventually(lambda: sum(len(s.token_ids) for s in streams) > 10)

            async def one_waits() -> bool:
                stats = await leaving.refresh_stats()
                return (stats.num_running, stats.num_waiting) == (1, 1)

            await eventually(one_waits)
            twin.row["open_tokens"] -= 1_000_000
            await leaving.client.call("drain")
            assert [await stream.done() for stream in streams] == wanted
            assert leaving.open_tokens == twin.open_tokens == 0
            assert (await leaving.refresh_stats()).num_waiting == 0


@pytest.mark.parametrize(
    "blow",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow), signal.SIGTERM],
)
async def test_streams_outlive_their_engine(
    smollm2: str,
    keys_dir: Path,
    fleet: Fleet,
    known: dict[str, list[int]],
    eventually: Any,
    blow: signal.Signals,
) -> None:
    """Killed; frozen, as if its node had vanished without a word; told to end at once."""
    lost = fleet.decode[0]
    fleet.spent.append(lost)
    async with routing(
        smollm2, keys_dir, [fleet.prefill.address], [core.address for core in fleet.decode]
    ) as client:
        await all_usable(client, 3)
        wanted = await expected(client, known)
        victim = link_of(client, lost)
        streams = await streams_at(client, victim, eventually)
        lost.signal(blow)
        await eventually(lambda: not victim.up)
        assert [await stream.done() for stream in streams] == wanted
        assert victim.open_tokens == 0


@pytest.mark.slow
async def test_requests_old_and_new_wait_for_their_only_engine_to_come_back(
    smollm2: str,
    keys_dir: Path,
    fleet: Fleet,
    known: dict[str, list[int]],
    eventually: Any,
) -> None:
    only = fleet.decode[0]
    async with routing(smollm2, keys_dir, [fleet.prefill.address], [only.address]) as client:
        await healthy(client)
        wanted = await expected(client, known)
        streams = await streams_at(client, link_of(client, only), eventually)
        only.kill()
        await eventually(lambda: client.num_held == len(streams))
        assert client.why_not_ready()
        await client.check_health()  # it keeps its place: new requests wait here too
        newcomer = asyncio.create_task(generate(client, "Anybody new?"))
        await eventually(lambda: client.num_held == len(streams) + 1)
        only.start()
        assert [await stream.done() for stream in streams] == wanted
        assert (await newcomer).finished
        assert client.num_held == 0
