"""What `diptych advise` finds for traces whose best service is known, and how it says so."""

from __future__ import annotations

import json
from typing import TypeVar

import pytest
from benchmarks.simulate.traffic import LengthSpread, Traffic, poisson
from benchmarks.traces.generate import generate
from click.testing import CliRunner
from msgspec import convert, structs, to_builtins

from diptych.advise.advice import (
    ENOUGH,
    LEAST_REQUESTS,
    MOST_EARLIER,
    ObservedService,
    ServiceShape,
    advise,
    simulate,
)
from diptych.advise.command import advise as command
from diptych.router_admin import LOAD_PATH, Told
from diptych.simulator.costs import StepShape
from diptych_protocol.admin import LoadReport, PastRequest, PoolLoad
from diptych_router.choosing.policies import POLICIES

T = TypeVar("T")
READING, WRITING = (
    Traffic(LengthSpread(2000, 0.3), LengthSpread(20)),
    Traffic(LengthSpread(100), LengthSpread(400)),
)
COUNT = 50


def answered(traffic: Traffic, rate: float, seed: int = 0, good: float = 1.0) -> list[PastRequest]:
    """good: the part of them that got what `report` promises."""
    requests = traffic.requests(poisson(rate, COUNT, seed), seed)
    return [
        PastRequest(
            unix_time=1e9 + request.arrival, prompt_tokens=request.prompt, cached_tokens=0,
            output_tokens=request.output, seconds=5.0,
            first_token_s=0.2 if at < good * COUNT else None,
        )
        for at, request in enumerate(requests)
    ]  # fmt: skip


def pool(role: str, engines: int, processors_part: float = 0.0) -> PoolLoad:
    return PoolLoad(
        role=role, engines=engines, step_s=0.005, prompt_token_s=1e-4, row_s=2e-4, move_s=0.005,
        move_token_s=1e-7, num_blocks=4000, block_size=16, max_num_seqs=32,
        max_num_batched_tokens=512, processors_part=processors_part,
    )  # fmt: skip


def report(
    requests: list[PastRequest],
    prefill: int = 1,
    decode: int = 1,
    ttft_ms: int | None = 1000,
    processors_part: float = 0.0,
    policy: str = "prefix_aware",
) -> LoadReport:
    sizes = {"prefill": prefill, "decode": decode}
    pools = [pool(role, size, processors_part) for role, size in sizes.items() if size]
    return LoadReport(
        policy=policy, disaggregate="always", ttft_ms=ttft_ms, inter_token_ms=None,
        pools=pools, requests=requests,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("traffic", "rate", "better", "worse"),
    [(READING, 8.0, (2, 1), (1, 2)), (WRITING, 12.0, (1, 2), (2, 1))],
    ids=["long prompts", "long answers"],
)
def test_more_pods_go_where_the_work_is(
    traffic: Traffic, rate: float, better: tuple[int, int], worse: tuple[int, int]
) -> None:
    service = ObservedService.of([report(answered(traffic, rate))], inter_token_ms=11.0)
    shapes = (ServiceShape(*each, "always", 512, "prefix_aware") for each in (better, worse))
    good, bad = (simulate(service, shape).kept for shape in shapes)
    assert good > bad + 0.1


def test_the_advice_holds_for_requests_that_it_has_not_seen() -> None:
    """Within a tenth of the best shape of as many pods, on requests that come later."""
    advice = advise(ObservedService.of([report(answered(READING, 5.0), 1, 3)]))
    later = ObservedService.of([report(answered(READING, 5.0, seed=7), 1, 3)])
    chosen, *others = (
        simulate(later, each.shape).kept
        for each in (advice.best, *advice.tried)
        if each.shape.pods == advice.best.shape.pods
    )
    assert chosen >= 0.9 * max(others)


def test_it_is_the_smallest_service_that_keeps_what_is_promised() -> None:
    advice = advise(ObservedService.of([report(answered(READING, 0.5), 2, 2)]))
    assert advice.best.kept >= ENOUGH
    fewer = [each for each in advice.tried if each.shape.pods < advice.best.shape.pods]
    assert advice.best.shape.pods == 1 or max(each.kept for each in fewer) < ENOUGH
    assert advice.best.shape.pods < 4


def test_steps_are_as_short_as_the_gaps_that_are_promised() -> None:
    """A step of 512 prompt tokens takes 56 ms, one of 128 takes 18."""
    advice = advise(ObservedService.of([report(answered(READING, 5.0), 0, 2)], inter_token_ms=20.0))
    assert advice.best.kept >= ENOUGH > advice.now.kept
    assert advice.best.max_num_batched_tokens == 128


def test_steps_stay_as_they_are_where_others_are_no_better() -> None:
    service = ObservedService.of([report(answered(READING, 0.5), 2, 2)])
    assert advise(service).best.max_num_batched_tokens == 512


@pytest.mark.parametrize("tokens", [-5, 0, 1])
def test_a_step_has_room_for_a_token_of_each_stream_whatever_engines_say(tokens: int) -> None:
    known = report(answered(READING, 0.5))
    pools = [structs.replace(each, max_num_batched_tokens=tokens) for each in known.pools]
    service = ObservedService.of([structs.replace(known, pools=pools)])
    assert simulate(service, service.shape).kept > 0.5


def test_more_engines_on_the_same_processors_do_not_keep_more() -> None:
    requests = answered(WRITING, 12.0)
    apart, together = (
        ObservedService.of([report(requests, processors_part=part)], inter_token_ms=11.0)
        for part in (0.0, 1.0)
    )
    more = ServiceShape(1, 2, "always", 512, "prefix_aware")
    assert simulate(apart, more).kept > simulate(together, more).kept + 0.1


def test_a_prefix_that_engines_had_is_not_computed_again() -> None:
    requests = answered(READING, 6.0)
    known = [
        PastRequest(
            unix_time=each.unix_time, prompt_tokens=each.prompt_tokens,
            cached_tokens=each.prompt_tokens - 50, output_tokens=each.output_tokens,
            first_token_s=each.first_token_s, seconds=each.seconds,
        )
        for each in requests
    ]  # fmt: skip
    new, old = (ObservedService.of([report(each)], ttft_ms=300.0) for each in (requests, known))
    assert simulate(new, new.shape).kept < 0.5 < ENOUGH < simulate(old, old.shape).kept


def turns(count: int = 150, seed: int = 0) -> list[PastRequest]:
    """Turns of conversations, as routers tell of them."""
    trace = generate("conversations", count, 0.7, 6.0, seed).scaled(128)
    return [
        PastRequest(
            unix_time=1e9 + each.arrival, prompt_tokens=each.prompt, cached_tokens=100,
            output_tokens=each.output, first_token_s=0.2, seconds=5.0,
            prefixes=[(part.end, part.key) for part in chain],
        )
        for each, chain in zip(trace.requests, trace.chains(), strict=True)
    ]  # fmt: skip


def in_turn(requests: list[PastRequest]) -> ObservedService:
    """A service whose routers take no notice of prefixes."""
    known = report(requests, 2, 1, ttft_ms=100, policy="round_robin")
    return ObservedService.of([known], inter_token_ms=20.0)


def test_a_policy_that_finds_more_prefixes_is_found_to_keep_more() -> None:
    service = in_turn(turns())
    blind, aware = (
        simulate(service, service.shape._replace(policy=policy)).kept
        for policy in ("round_robin", "prefix_aware")
    )
    assert aware > blind + 0.1


def test_the_policy_holds_for_requests_that_advice_has_not_seen() -> None:
    """Within a tenth of the best of all shapes of as many pods with each of the policies."""
    advice, later = advise(in_turn(turns(80))), in_turn(turns(80, seed=7))
    chosen = simulate(later, advice.best.shape).kept
    shapes = {
        each.shape._replace(policy=policy)
        for each in advice.tried
        for policy in POLICIES
        if each.shape.pods == advice.best.shape.pods
    }
    assert chosen >= 0.9 * max(simulate(later, shape).kept for shape in shapes)
    assert advice.compares_policies


def test_the_policy_stays_where_others_are_no_better() -> None:
    requests = [structs.replace(each, prefixes=[]) for each in answered(READING, 0.5)]
    known = report(requests, 2, 2, policy="least_loaded")
    advice = advise(ObservedService.of([known]))
    assert {each.policy for each in advice.tried} == set(POLICIES)
    assert advice.best.policy == "least_loaded"


def test_prefixes_that_no_engine_ever_found_are_not_expected() -> None:
    """They keep none, then."""
    requests = [structs.replace(each, cached_tokens=0) for each in turns()]
    service = in_turn(requests)
    alike = in_turn([structs.replace(each, prefixes=[]) for each in requests])
    assert simulate(service, service.shape) == simulate(alike, alike.shape)


def test_engines_remember_what_came_before_the_newest_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diptych.advise.advice.MOST_REQUESTS", 40)
    known = turns(MOST_EARLIER + 40)
    warm, cold = in_turn(known), in_turn(known[-40:])
    assert (len(warm.earlier), warm.requests) == (MOST_EARLIER, cold.requests)
    more, fewer = (simulate(each, each.shape).ttft_ms["p50"] for each in (warm, cold))
    assert more < fewer


def test_several_routers_reports_are_one_service() -> None:
    requests = answered(READING, 2.0)
    parts = [report(requests[at::2]) for at in range(2)]
    whole = ObservedService.of([report(requests)])
    assert ObservedService.of(parts)._replace(pools={}, routers=1) == whole._replace(pools={})


def test_too_little_to_go_by_is_said_with_a_remedy() -> None:
    few = answered(READING, 1.0)[: LEAST_REQUESTS - 1]
    with pytest.raises(ValueError, match=f"at least {LEAST_REQUESTS} requests"):
        ObservedService.of([report(few)])
    with pytest.raises(ValueError, match="--ttft-ms, --inter-token-ms"):
        ObservedService.of([report(answered(READING, 1.0), ttft_ms=None)])


@pytest.mark.parametrize(
    ("good", "said"),
    [
        (1.0, "to keep its promises to 100% of the requests, and did so to 100%. "),
        (0.5, "and did so to 50%. That is too far off to follow this advice"),
    ],
)
def test_the_error_of_the_prediction_is_told_with_it(
    good: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = report(answered(READING, 0.5, good=good))

    def ask(name: str | None, path: str, kind: type[T]) -> tuple[list[Told[T]], list[str]]:
        assert (name, path, kind) == ("it", LOAD_PATH, LoadReport)
        return [Told("router-0", known)], ["router-1: is gone"]  # type: ignore

    monkeypatch.setattr("diptych.why.ask_service", ask)
    done = CliRunner().invoke(command, ["it"])
    assert done.exit_code == 0, done.output
    assert said in done.stdout
    assert "promised: the first token in 1000 ms\n" in done.stdout
    assert "router-1: is gone" in done.stderr
    told = json.loads(CliRunner().invoke(command, ["it", "--json"]).stdout)
    assert told["is_trusted"] is (good == 1.0)
    assert told["best"] in told["tried"]


@pytest.mark.parametrize("told", [True, False], ids=["names", "an older router"])
def test_policies_are_compared_where_routers_say_which_prompts_begin_alike(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = turns(60)
    known = report(
        requests if told else [structs.replace(each, prefixes=None) for each in requests],
        2, 1, ttft_ms=100, policy="round_robin",
    )  # fmt: skip
    monkeypatch.setattr("diptych.why.ask_service", lambda *_: ([Told("router-0", known)], []))
    done = CliRunner().invoke(command, ["--inter-token-ms", "20"])
    assert done.exit_code == 0, done.output
    assert ("Set spec.router.policy: " in done.stdout) is told
    assert ("leastLoaded" in done.stdout) is told
    assert ("Other policies were not tried" in done.stdout) is not told


def test_what_a_newer_router_tells_besides_is_ignored() -> None:
    known = to_builtins(report(turns(30)))
    known["requests"][0]["weather"] = known["weather"] = "fine"
    assert convert(known, LoadReport) == report(turns(30))


def test_a_question_that_cannot_be_answered_ends_with_two(monkeypatch: pytest.MonkeyPatch) -> None:
    known = report(answered(READING, 0.5), ttft_ms=None)
    monkeypatch.setattr("diptych.why.ask_service", lambda *_: ([Told("router-0", known)], []))
    done = CliRunner().invoke(command, ["it"])
    assert done.exit_code == 2
    assert "give --ttft-ms, --inter-token-ms or both" in done.stderr


def test_a_step_takes_what_engines_reported() -> None:
    service = ObservedService.of([report(answered(READING, 1.0))])
    plan = service.plan(service.shape)
    chunk, rows = StepShape(tokens=500, sampled=0), StepShape(tokens=8, sampled=8)
    assert plan.prefill.cost.seconds(chunk) == pytest.approx(0.005 + 500e-4)
    assert plan.decode.cost.seconds(rows) == pytest.approx(0.005 + 8 * 2e-4)
