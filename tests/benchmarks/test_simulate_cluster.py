"""The simulated service: conservation, queueing theory, monotony, losses, determinism."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.simulate import zones
from benchmarks.simulate.fitting import fit
from benchmarks.simulate.traffic import LengthSpread, Sharing, Traffic, bursty, poisson
from benchmarks.traces.generate import KINDS, generate
from benchmarks.traces.recorded import of_trace

from diptych.simulator.cluster import Simulation
from diptych.simulator.costs import StepCost, StepShape
from diptych.simulator.engine import EngineLimits, Sequence
from diptych.simulator.metrics import Objectives, summarise
from diptych.simulator.plan import Overheads, Pod, SimulatedPool, SimulatedService, statistics
from diptych.simulator.workload import Request
from diptych_router.choosing.policies.prefix_aware import POLICY as PREFIX_AWARE

COST = StepCost(((1, 0.004), (64, 0.006), (512, 0.03)), 1e-5, 1e-9, 2e-8)
LIMITS = EngineLimits(num_blocks=2000, block_size=16, max_num_seqs=32, max_num_batched_tokens=512)
FREE = Overheads(0.0, 0.0, 0.0)
TRAFFIC = Traffic(LengthSpread(300, 0.7, 4000), LengthSpread(40, 0.5, 400))
OBJECTIVES = Objectives(ttft_s=0.3, tpot_s=0.02)


def plan(prefill: int, decode: int, **changes: object) -> SimulatedService:
    overheads = Overheads(0.003, 0.002, 1e-6)
    base = SimulatedService(
        SimulatedPool(prefill, COST, LIMITS), SimulatedPool(decode, COST, LIMITS), overheads
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def traffic(rate: float, count: int, seed: int = 1) -> list[Request]:
    return TRAFFIC.requests(poisson(rate, count, seed), seed)


@pytest.mark.parametrize(
    ("prefill", "decode", "routers", "num_blocks"),
    [(2, 2, 1, 2000), (0, 3, 1, 2000), (3, 1, 4, 600), (1, 2, 2, 300)],
)
def test_every_request_ends_once_and_gives_everything_back(
    prefill: int, decode: int, routers: int, num_blocks: int
) -> None:
    tight = replace(LIMITS, num_blocks=num_blocks)
    requests = traffic(30, 300)
    first, second = (SimulatedPool(pods, COST, tight) for pods in (prefill, decode))
    simulation = Simulation(
        SimulatedService(first, second, Overheads(0.003, 0.002, 1e-6), routers=routers)
    )
    log = simulation.run(requests)
    assert sorted(id(job.request) for job in log.jobs) == sorted(map(id, requests))
    assert log.unanswered == []
    assert sum(log.gap_counts) == sum(request.output - 1 for request in requests)
    for pod in simulation.pods.values():
        assert pod.engine.free == num_blocks
        assert (pod.engine.rows, pod.engine.reserved, len(pod.engine.waiting)) == (0, 0, 0)
    for router in simulation.routers:
        for row in router.rows.values():
            assert (row["open_tokens"], row.num_planned) == (0, 0)


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_one_engine_that_serves_one_after_the_other_is_an_m_d_1_queue(load: float) -> None:
    """Mean wait of a queue with constant service: Pollaczek and Khinchine."""
    service = 0.01
    constant = StepCost(((1, service),), 0.0, 0.0, 0.0)
    alone = SimulatedPool(1, constant, replace(LIMITS, max_num_seqs=1))
    simulation = Simulation(SimulatedService(replace(alone, pods=0), alone, FREE))
    arrivals = poisson(load / service, 12000, 7)
    log = simulation.run(Traffic(LengthSpread(16), LengthSpread(1)).requests(arrivals, 7))
    waits = [job.first_at - job.arrival - service for job in log.jobs]
    assert np.mean(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=0.1)


def test_what_comes_in_is_what_is_there_times_how_long_it_stays() -> None:
    """Little's law, of all requests from their arrivals to their ends."""
    log = Simulation(plan(1, 1)).run(traffic(8, 1500))
    stays = np.array([job.ended_at - job.arrival for job in log.jobs])
    begin, end = 20.0, min(job.request.arrival for job in log.jobs) + 160.0
    moments = np.linspace(begin, end, 4001)
    starts = np.sort([job.arrival for job in log.jobs])
    ends = np.sort([job.ended_at for job in log.jobs])
    present = np.searchsorted(starts, moments) - np.searchsorted(ends, moments)
    assert present.mean() == pytest.approx(8 * stays.mean(), rel=0.08)


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_more_pods_are_never_worse(pool: str) -> None:
    attained, tight = [], replace(OBJECTIVES, tpot_s=0.0047)
    for pods in (1, 2, 3, 4):
        sizes = {"prefill": 4, "decode": 4, pool: pods}
        log = Simulation(plan(**sizes)).run(traffic(60, 400))
        attained.append(summarise(log, tight).attained)
    assert attained == sorted(attained)
    assert attained[0] < attained[-1]


def test_a_seed_says_everything_and_another_one_something_else() -> None:
    def run(seed: int) -> object:
        log = Simulation(plan(2, 1)).run(traffic(20, 200, seed))
        return summarise(log, OBJECTIVES)

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_losses_cost_time_but_no_request() -> None:
    requests = traffic(30, 600)
    quiet = Simulation(plan(3, 3, detection_s=0.5)).run(requests)
    simulation = Simulation(plan(3, 3, detection_s=0.5))
    log = simulation.run(requests, [(5.0, ["prefill-0", "prefill-2", "decode-1", "decode-2"])])
    assert len(log.jobs) == len(requests)
    assert sum(log.gap_counts) >= sum(request.output - 1 for request in requests) * 0.99
    again = [job for job in log.jobs if job.attempts > 1]
    assert again
    assert max(j.ended_at - j.arrival for j in again) > 0.5
    slow, fast = (summarise(each, OBJECTIVES).attained for each in (log, quiet))
    assert slow < fast
    for pod in simulation.pods.values():
        if pod.alive:
            assert pod.engine.free == LIMITS.num_blocks


def test_what_waits_for_kv_is_in_a_pods_report_until_it_is_there() -> None:
    pod = Pod("decode-0", "decode", SimulatedPool(1, COST, LIMITS), [0])
    row = Sequence(33, 4, remote=32)
    pod.engine.add(row)
    pod.engine.begin()
    assert statistics(pod, moves=True).num_waiting_for_remote_kv == 1
    pod.engine.received(row)
    assert statistics(pod, moves=True).num_waiting_for_remote_kv == 0


def test_two_engines_on_one_machine_slow_each_other() -> None:
    shared = plan(1, 1, one_machine=True)
    shared = replace(shared, decode=replace(shared.decode, slowdown=2.0))
    requests = TRAFFIC.requests(np.zeros(80), 5, users=8)
    apart, beside = (
        summarise(Simulation(p).run(requests), OBJECTIVES) for p in (plan(1, 1), shared)
    )
    assert beside.itl_ms["p90"] > 1.3 * apart.itl_ms["p90"]
    assert beside.output_tokens_per_s < apart.output_tokens_per_s


def test_the_router_chooses_as_well_as_the_better_way_where_engines_share_a_machine() -> None:
    """The decode engine has half as many cores, and gets none while the other one computes."""
    slow = StepCost(((1, 0.004), (64, 0.012), (512, 0.06)), 1e-5, 1e-9, 2e-8)
    decode = SimulatedPool(1, slow, LIMITS, slowdown=5.0)
    shared = replace(plan(1, 1, one_machine=True, policy=PREFIX_AWARE), decode=decode)
    first_s = {}
    for way in ("always", "never", "auto"):
        log = Simulation(replace(shared, disaggregate=way)).run(traffic(6, 300))
        first_s[way] = np.mean([job.first_at - job.arrival for job in log.jobs])
    assert first_s["auto"] <= 1.05 * min(first_s.values())


def test_users_who_wait_for_answers_are_never_more_than_they_are() -> None:
    log = Simulation(plan(1, 1)).run(TRAFFIC.requests(np.zeros(80), 5, users=4))
    assert len(log.jobs) == 80
    for job in log.jobs:
        begun = sum(other.arrival <= job.arrival for other in log.jobs)
        ended = sum(other.ended_at <= job.arrival for other in log.jobs)
        assert begun - ended <= 4


def test_bursts_have_the_rate_and_the_variation_that_is_asked_for() -> None:
    gaps = np.diff(bursty(50.0, 40000, 1, 3.0))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.1)


def test_common_prefixes_are_put_before_prompts() -> None:
    shared = Traffic(LengthSpread(100), LengthSpread(5), Sharing(0.5, 4, 64))
    requests = shared.requests(poisson(10, 2000, 1), 1)
    with_prefix = [r for r in requests if r.chain]
    assert len(with_prefix) == pytest.approx(1000, rel=0.1)
    assert {r.prompt for r in with_prefix} == {164}
    assert {r.prompt for r in requests if not r.chain} == {100}


@pytest.mark.parametrize("kind", KINDS)
def test_one_engine_with_room_and_time_hits_what_a_trace_allows(kind: str) -> None:
    trace = generate(kind, 200, 0.5, 2.0, seed=3).scaled(64).faster(0.05)
    alone = SimulatedPool(1, COST, replace(LIMITS, num_blocks=100_000))
    log = Simulation(SimulatedService(replace(alone, pods=0), alone, FREE)).run(of_trace(trace))
    hit_rate = summarise(log, OBJECTIVES).hit_rate
    # An engine hits whole blocks of 16 tokens.
    assert hit_rate == pytest.approx(trace.ideal_hit_rate(), abs=0.02)
    assert hit_rate <= trace.ideal_hit_rate()


def test_a_request_that_no_engine_has_room_for_fails_and_holds_nobody_up() -> None:
    small = SimulatedPool(1, COST, replace(LIMITS, num_blocks=20))
    fitting, too_long = Request(0.0, 300, 20), Request(1.0, 300, 21)
    log = Simulation(SimulatedService(small, small, FREE)).run(
        [fitting, too_long, replace(fitting, arrival=2)]
    )
    got = summarise(log, Objectives(9.0, 9.0))
    assert (got.requests, got.failed) == (2, 1)
    assert got.attained == pytest.approx(2 / 3)
    waiting = [replace(too_long, arrival=0.0), replace(fitting, waits=True)]
    assert len(Simulation(SimulatedService(small, small, FREE)).run(waiting).jobs) == 1


def test_pools_that_are_full_do_not_wait_for_each_other() -> None:
    """P's blocks wait for D's, and D's are reserved for prompts that P has no blocks for."""
    tight = SimulatedPool(1, COST, replace(LIMITS, num_blocks=160, block_size=16))
    trace = generate("conversations", 200, 0.4, 20.0, seed=5).scaled(64)
    fitting = [r for r in of_trace(trace) if r.prompt + r.output <= 160 * 16]
    log = Simulation(SimulatedService(tight, tight, FREE)).run(fitting)
    assert log.unanswered == []
    assert len(log.jobs) == len(fitting)


def test_less_memory_hits_less() -> None:
    trace = generate("agents", 200, 0.6, 2.0, seed=3).scaled(64).faster(0.05)
    hit_rates = []
    for num_blocks in (400, 2000, 100_000):
        pool = SimulatedPool(1, COST, replace(LIMITS, num_blocks=num_blocks))
        log = Simulation(SimulatedService(pool, pool, FREE)).run(of_trace(trace))
        hit_rates.append(summarise(log, OBJECTIVES).hit_rate)
    assert hit_rates == sorted(hit_rates)
    assert hit_rates[0] < hit_rates[1] < hit_rates[2]


def test_a_fit_finds_the_model_that_made_the_times() -> None:
    shapes = [
        StepShape(tokens, sampled, pairs * tokens, kv)
        for tokens, sampled in ((1, 1), (1, 0), (16, 16), (64, 1), (200, 8), (512, 1), (512, 4))
        for pairs, kv in ((0, 0), (300, 0), (0, 4000))
    ]
    found = fit(shapes, [COST.seconds(shape) for shape in shapes], [1, 64, 512])
    assert max(map(abs, found.errors)) < 1e-6
    assert found.cost.sampled_row_s == pytest.approx(COST.sampled_row_s)


def test_a_fit_never_says_that_more_tokens_take_less_time() -> None:
    shapes = [StepShape(tokens, 0) for tokens in (1, 2, 4, 8)]
    cost = fit(shapes, [0.02, 0.01, 0.03, 0.025], [1, 2, 4, 8]).cost
    seconds = [cost.seconds(StepShape(tokens, 0)) for tokens in range(1, 9)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(("rate", "overloaded"), [(20, False), (120, True)])
def test_refusing_what_would_be_late_raises_goodput_under_overload(
    rate: float, overloaded: bool
) -> None:
    requests = traffic(rate, 800)
    goods, logs = [], []
    for promised_s in (None, OBJECTIVES.ttft_s):
        service = plan(2, 2, policy=PREFIX_AWARE, disaggregate="always", promised_s=promised_s)
        logs.append(Simulation(service).run(requests))
        goods.append(summarise(logs[-1], OBJECTIVES).goodput_per_s)
    without, refusing = logs
    assert not without.refused
    assert len(refusing.jobs) + len(refusing.refused) == len(requests)
    if overloaded:
        assert goods[1] > 1.5 * goods[0]
    else:
        assert len(refusing.refused) <= len(requests) / 100
        assert goods[1] >= 0.99 * goods[0]


def test_a_router_that_is_told_of_zones_and_moves_hands_over_within_a_zone() -> None:
    told = {knows: zones.at(2, 2.0, knows, 12.0) for knows in ("no", "zones and moves")}
    far, slow_ms = "to the other zone", "hand-off mean ms"
    assert told["no"][far] > 0.3
    assert told["zones and moves"][far] < 0.1
    assert told["zones and moves"][slow_ms] < told["no"][slow_ms] / 2
