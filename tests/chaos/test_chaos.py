"""A service of real processes in short chaos; `make chaos` does all of this at length.

P4, P7, P8 and P10 use the same service, which must be as well after each test as before.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial

import psutil
import pytest
import pytest_asyncio
from chaos_kit.campaign import Campaign, campaign, settled
from chaos_kit.faults import (
    ANYWHERE,
    ON_A_NETWORK,
    Fault,
    black_hole,
    out_of_memory,
    resets,
    slow_readers,
    stale_references,
    stop_decode,
    strangers,
    visit_hinge,
)
from chaos_kit.faulty_network import why_no_networks
from chaos_kit.hostile_bytes import pester_core
from chaos_kit.load import Load
from chaos_kit.rejections import UNSERVABLE, Pair, rejected
from chaos_kit.service import PREFIX_AWARE, REST_S, Engine, Footprint, Service
from drawn_seed import drawn_seed
from model_kit.sensitive_model import Question
from waits import PATIENCE_S

MESSAGES = int(os.environ.get("DIPTYCH_TEST_MESSAGES", "10000"))
REJECTIONS = int(os.environ.get("DIPTYCH_TEST_REJECTIONS", "10"))
"""Rejections of each kind."""
REPLACEMENTS = int(os.environ.get("DIPTYCH_TEST_REPLACEMENTS", "2"))
BURSTS = 10
IDLE_S, IDLE_CPU = 2.0, 0.2
"""How long a service is idle, and the part of a processor that an engine may need then."""
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chaos(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Campaign]:
    folder = tmp_path_factory.mktemp("chaos")
    names = ("prefill-0", "decode-0", "decode-1")
    networked = not why_no_networks()
    async with campaign(folder, networked=networked, names=names, steering=PREFIX_AWARE) as chaos:
        yield chaos


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(stop_decode, marks=pytest.mark.slow),
        pytest.param(stale_references, marks=pytest.mark.slow),
        pytest.param(out_of_memory, marks=pytest.mark.slow),
        pytest.param(slow_readers, marks=pytest.mark.slow),
        black_hole,
        resets,
        strangers,
    ],
    ids=lambda f: f.__name__,
)
async def test_chaos_costs_no_answer_and_leaves_nothing_behind(
    chaos: Campaign, fault: Fault
) -> None:
    if fault in ON_A_NETWORK and fault not in ANYWHERE and chaos.service.network is None:
        pytest.skip(why_no_networks())
    report = await chaos.run(random.randrange(10**6), fault)
    assert not report.problems, str(report)


async def test_prefixes_were_fetched_meanwhile(chaos: Campaign) -> None:
    """The requests of chaos do fetch, so that its faults meet that, too.

    Which requests do depends on who is busy when they come, so there are several bursts.
    """
    for _ in range(BURSTS):
        load = Load(lambda: chaos.service.router, chaos.asked, 2)
        load.burst(40)
        await load.finish(PATIENCE_S)
        hinges = [(await engine.stats()).kv_transfer for engine in chaos.service.engines]
        fetched = sum(hinge.prefix_fetches_completed for hinge in hinges if hinge is not None)
        if fetched:
            break
    assert fetched > 0
    assert await chaos.service.at_rest(REST_S) == []


async def canary(service: Service, asked: list[Question]) -> None:
    """Some questions, which must all be answered right, and nothing may be left of them."""
    load = Load(lambda: service.router, asked, 1)
    load.burst(12)
    await load.finish(PATIENCE_S)
    assert [str(fate) for fate in load.fates if fate.outcome != "answered" or fate.wrong] == []
    assert await service.at_rest(REST_S) == []


async def test_P4_mutated_messages_to_both_ports_harm_no_other_request(chaos: Campaign) -> None:
    rng = random.Random(drawn_seed())
    service = chaos.service
    pids = [engine.pid for engine in service.engines]
    cuts = 0
    share = MESSAGES // len(pids)
    to_hinge = share // 10  # it answers most by cutting us off, which takes its time
    for engine in service.engines:
        endpoint = engine.process.endpoint
        await asyncio.to_thread(pester_core, endpoint, rng, share - to_hinge)
        cuts += await asyncio.to_thread(visit_hinge, engine, rng, to_hinge)
        await canary(service, chaos.asked)
    assert cuts > 0
    assert [engine.pid for engine in service.engines] == pids
    for engine in service.engines:
        engine.fail_if_dead()


@pytest.fixture
def pair(chaos: Campaign) -> Iterator[Pair]:
    """Engines that are connected."""
    service = chaos.service
    pair = Pair(service.of("prefill")[0], service.of("decode")[0])
    yield pair
    pair.close()


async def test_P7_a_rejection_frees_prefill_at_once_whatever_state_decode_is_in(
    chaos: Campaign, pair: Pair
) -> None:
    def play() -> None:
        pair.refused(**UNSERVABLE)  # now there is a connection
        rejected(pair, "unservable", partial(pair.refused, **UNSERVABLE), REJECTIONS)
        rejected(pair, "decode is full", pair.refused_when_full, REJECTIONS)
        pair.empty()
        for begin, end in (
            (("pause_generation", "keep", False), "resume_generation"),
            (("sleep", 0, "abort"), "wake_up"),
        ):
            assert pair.decode.call(*begin) is None
            after = f"after {begin[0]}"
            refused = partial(pair.refused, **UNSERVABLE)
            rejected(pair, f"unservable, {after}", refused, REJECTIONS)
            rejected(pair, f"told to decode, {after}", pair.told_to_decode, REJECTIONS)
            assert pair.decode.call(end) is None

    await asyncio.to_thread(play)
    await chaos.service.ready()
    assert await chaos.service.at_rest(REST_S) == []


async def test_P7_a_rejection_frees_prefill_without_decode_or_without_a_connection(
    chaos: Campaign, pair: Pair
) -> None:
    gone = chaos.service.of("decode")[0]

    def play() -> None:
        rejected(pair, "never connected", pair.refused_by_a_stranger, REJECTIONS)
        gone.signal(signal.SIGSTOP)
        try:
            rejected(pair, "told to prefill", pair.told_to_prefill, REJECTIONS)
        finally:
            gone.signal(signal.SIGCONT)

    await asyncio.to_thread(play)
    await chaos.service.ready()
    assert await chaos.service.at_rest(REST_S) == []


async def test_P10_an_idle_service_costs_no_cpu_and_its_accounts_close(chaos: Campaign) -> None:
    """Every prefill engine is connected to every decode engine, and to a router."""
    await canary(chaos.service, chaos.asked)
    before = [cpu_seconds(engine) for engine in chaos.service.engines]
    began = time.monotonic()
    await asyncio.sleep(IDLE_S)
    idle_s = time.monotonic() - began  # longer on a busy machine
    spent = [
        cpu_seconds(engine) - start
        for engine, start in zip(chaos.service.engines, before, strict=True)
    ]
    print(f"CPU seconds of each engine in {idle_s:g} s: {spent}")
    assert max(spent) < IDLE_CPU * idle_s
    for engine in chaos.service.of("prefill"):
        hinge = (await engine.stats()).kv_transfer
        assert hinge is not None
        ended = hinge.leases_released + hinge.leases_revoked + hinge.leases_expired
        assert hinge.leases_granted == ended


def cpu_seconds(engine: Engine) -> float:
    times = psutil.Process(engine.pid).cpu_times()
    return float(times.user + times.system)


async def test_P8_engines_are_replaced_at_their_addresses_and_nobody_else_is_touched(
    chaos: Campaign,
) -> None:
    service = chaos.service
    slowest = 0.0
    for number in range(REPLACEMENTS):
        role, other = ("decode", "prefill") if number % 2 == 0 else ("prefill", "decode")
        [gone, *rest] = service.of(role)
        survivors = [*rest, *service.of(other)]
        pids = [engine.pid for engine in survivors]
        await canary(service, chaos.asked)  # so that somebody is connected to it
        connected = {engine.name: held(engine) for engine in service.of(other)}
        epoch = await epoch_of(gone)
        gone.kill()
        await settled(partial(let_go, service.of(other), connected))
        begin = time.monotonic()
        gone.start()
        await canary(service, chaos.asked)  # the other one serves meanwhile
        await service.ready()
        slowest = max(slowest, time.monotonic() - begin)
        assert await epoch_of(gone) != epoch
        await canary(service, chaos.asked)
        assert [engine.pid for engine in survivors] == pids
    print(f"{REPLACEMENTS} replacements, verified again after {slowest:.1f} s at most")


def let_go(engines: list[Engine], before: dict[str, int]) -> bool:
    """Who was connected to the peer that is gone holds less; there is no new one yet."""
    return any(held(engine) < before[engine.name] for engine in engines)


def held(engine: Engine) -> int:
    return Footprint.of(engine.pid).descriptors


async def epoch_of(engine: Engine) -> str:
    return (await engine.probe.describe(PATIENCE_S)).epoch
