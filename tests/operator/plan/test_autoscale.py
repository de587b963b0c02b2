"""The autoscaler: each signal, both pools asleep and awake together, and properties of any load."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cases import each
from cluster_kit.promised_pool import engine_report, router_report
from hypothesis import given
from hypothesis import strategies as st

from diptych_operator.api.pools import (
    NOTHING,
    Counts,
    DecodeAutoscaling,
    DecodePool,
    PrefillAutoscaling,
    PrefillPool,
)
from diptych_operator.autoscale import Memory, Recommendation, Scaling, autoscale
from diptych_protocol.admin import EngineReport, RouterReport

PATIENCE = 300
PREFILL = PrefillPool(autoscaling=PrefillAutoscaling(max_replicas=20))
DECODE = DecodePool(autoscaling=DecodeAutoscaling(max_replicas=20))
SLEEPY_PREFILL = PrefillPool(autoscaling=PrefillAutoscaling(min_replicas=0, max_replicas=20))
SLEEPY_DECODE = DecodePool(autoscaling=DecodeAutoscaling(min_replicas=0, max_replicas=20))
WHOLE_PATIENCE = Memory(busy_at=0.0)
LONG_AGO = (Recommendation(at=0.0, pods=1),)
NOTHING_HELD_BACK = Memory(LONG_AGO, LONG_AGO, busy_at=0.0)
"""No recommendation of the window stands in the way of fewer pods."""


def router(*engines: EngineReport, open_requests: int = 0, held: int = 0) -> RouterReport:
    return router_report(engines, open_requests=open_requests, held_requests=held)


def pool(role: str, count: int, **facts: Any) -> list[EngineReport]:
    return [engine_report(role, number, **facts) for number in range(count)]


def scale(
    wanted: Counts,
    *reports: RouterReport,
    prefill: PrefillPool | None = PREFILL,
    decode: DecodePool = DECODE,
    ready: Counts | None = None,
    memory: Memory = WHOLE_PATIENCE,
    now: float = 1000.0,
    unreachable: int = 0,
    rolls: bool = False,
) -> Scaling:
    return autoscale(
        prefill,
        decode,
        wanted,
        wanted if ready is None else ready,
        reports,
        memory,
        now,
        block_size=16,
        unreachable_routers=unreachable,
        rolls=rolls,
    )


def loaded(prefill: int, decode: int, tokens: int, kv: float, waiting: int) -> RouterReport:
    """All prefill tokens wait at one engine; KV use (in pods) is spread over all of decode."""
    return router(
        *pool("prefill", prefill - 1),
        engine_report("prefill", 99, queued_prompt_tokens=tokens),
        *pool("decode", decode - 1, kv_usage=min(1.0, kv / decode)),
        engine_report("decode", 99, kv_usage=min(1.0, kv / decode), num_waiting=waiting),
        open_requests=1,
    )


@pytest.mark.parametrize(
    ("kv", "waiting", "pods"), [(0.0, 0, 2), (1.6, 0, 2), (2.4, 0, 3), (1.6, 17, 5)]
)
def test_a_pool_without_prefill_beside_it_follows_the_same_signals(
    kv: float, waiting: int, pods: int
) -> None:
    report = router(*pool("decode", 2, kv_usage=kv / 2, num_waiting=-(-waiting // 2)))
    found = scale(Counts(0, 2), report, prefill=None, memory=Memory(busy_at=0.0))
    assert found.desired == Counts(0, pods)


def test_one_pool_sleeps_and_wakes_alone() -> None:
    awake = scale(Counts(0, 2), router(*pool("decode", 2)), prefill=None, decode=SLEEPY_DECODE)
    assert awake.desired == NOTHING
    asleep = scale(NOTHING, router(), prefill=None, decode=SLEEPY_DECODE)
    assert asleep.desired == NOTHING
    woken = scale(NOTHING, router(held=1), prefill=None, decode=SLEEPY_DECODE)
    assert woken.desired == Counts(0, 1)
    fixed = scale(Counts(0, 1), router(), prefill=None, decode=DecodePool(replicas=3))
    assert fixed.desired == Counts(0, 3)


@each(
    ("tokens", "held_blocks", "pods"),
    [
        (0, 0, 2),
        (4096, 0, 2),
        (4096 * 2 + 1, 0, 3),
        (20480, 0, 5),
        (20480, 256, 4),
        (20480, 1280, 2),
        (20480, 100_000, 2),
        (409600, 0, 5),
    ],
)
def test_prefill_follows_uncached_tokens_but_not_those_that_decode_holds_up(
    tokens: int, held_blocks: int, pods: int
) -> None:
    report = router(
        engine_report("prefill", 0, queued_prompt_tokens=tokens, blocks_held=held_blocks,
               leases_held=held_blocks, kv_usage=1.0),
        engine_report("prefill", 1),
        *pool("decode", 1),
    )  # fmt: skip
    assert scale(Counts(2, 1), report).desired == Counts(pods, 1)


@each(
    ("pods", "usage", "waiting", "expected"),
    [
        (4, 0.80, 0, 4),
        (4, 0.87, 0, 4),
        (4, 0.90, 0, 5),
        (4, 0.73, 0, 4),
        (1, 1.00, 0, 2),
        (4, 0.40, 0, 4),
        (4, 0.40, 16, 4),
        (4, 0.40, 17, 5),
        (4, 0.90, 30, 8),
        (4, 0.40, 999, 9),
    ],
)
def test_decode_follows_the_larger_of_memory_and_queue(
    pods: int, usage: float, waiting: int, expected: int
) -> None:
    engines = pool("decode", pods - 1, kv_usage=usage)
    engines.append(engine_report("decode", 99, kv_usage=usage, num_waiting=waiting))
    report = router(*pool("prefill", 1), *engines)
    assert scale(Counts(1, pods), report).desired == Counts(1, expected)


def test_two_routers_see_the_same_engines_once() -> None:
    first = loaded(2, 2, 20480, 1.6, 3)
    assert scale(Counts(2, 2), first, first).desired == scale(Counts(2, 2), first).desired


def test_of_two_reports_of_an_engine_the_larger_numbers_count() -> None:
    early = router(*pool("prefill", 1), engine_report("decode", 0, kv_usage=1.0))
    late = router(
        engine_report("prefill", 0, queued_prompt_tokens=8193),
        engine_report("decode", 0, kv_usage=0.5),
    )
    for reports in ((early, late), (late, early)):
        assert scale(Counts(1, 1), *reports).desired == Counts(3, 2)


def test_fewer_pods_would_come_if_all_were_in_view() -> None:
    """The same facts that keep a pool as it is while engines are missing."""
    report = router(*pool("prefill", 2), *pool("decode", 2))
    seen = scale(Counts(4, 4), report, ready=Counts(2, 2), memory=NOTHING_HELD_BACK)
    assert seen.desired == Counts(1, 1)
    missing = scale(Counts(4, 4), report, ready=Counts(3, 3), memory=NOTHING_HELD_BACK)
    assert missing.desired == Counts(4, 4)
    assert "not all engines in view" in missing.reason


def test_the_reason_names_the_numbers() -> None:
    scaled = scale(Counts(2, 2), loaded(2, 2, 20480, 1.6, 0))
    assert scaled.reason == (
        "prefill: 20480 uncached tokens wait, 4096 each: 5 pods; "
        "decode: KV of 1.6 pods in use, 80 % each: 2 pods"
    )


def test_fewer_pods_only_after_all_of_scale_down_seconds() -> None:
    wanted, memory, seen = Counts(5, 5), Memory(), []
    for now in range(0, PATIENCE + 60, 30):
        tokens = 4096 * 4 if now == 60 else 4096
        scaled = scale(wanted, loaded(5, 5, tokens, 4.0, 0), memory=memory, now=float(now))
        memory = scaled.memory
        seen.append(scaled.desired.prefill)
        assert scaled.desired.decode == 5
    assert seen == [5] * 10 + [4] * 2
    assert "fewer if that lasts 300 s" in scale(wanted, loaded(5, 5, 0, 4.0, 0)).reason


def test_after_a_lost_memory_nothing_shrinks_for_a_while() -> None:
    assert scale(Counts(5, 5), loaded(5, 5, 0, 0.0, 0), memory=Memory()).desired == Counts(5, 5)


def test_a_pool_without_autoscaling_keeps_its_number() -> None:
    report = loaded(3, 2, 999_999, 2.0, 0)
    scaled = scale(Counts(3, 2), report, prefill=PrefillPool(replicas=3))
    assert scaled.desired == Counts(3, 3)
    one = scale(Counts(1, 1), report, prefill=PrefillPool(), decode=DecodePool())
    assert one.desired == Counts(1, 1)


def test_new_bounds_hold_at_once() -> None:
    narrow = PrefillPool(autoscaling=PrefillAutoscaling(min_replicas=2, max_replicas=3))
    for wanted, expected in ((1, 2), (9, 3)):
        assert scale(Counts(wanted, 1), prefill=narrow).desired.prefill == expected


# Sleep.


def sleepy(wanted: Counts, *reports: RouterReport, memory: Memory, now: float) -> Scaling:
    return scale(
        wanted, *reports, prefill=SLEEPY_PREFILL, decode=SLEEPY_DECODE, memory=memory, now=now
    )


def test_an_idle_service_falls_asleep_and_wakes_with_a_held_request() -> None:
    quiet = router(*pool("prefill", 1), *pool("decode", 1))
    first = sleepy(Counts(1, 1), quiet, memory=Memory(), now=50.0)
    assert first.desired == Counts(1, 1)
    almost = sleepy(Counts(1, 1), quiet, memory=first.memory, now=349.0)
    assert almost.desired == Counts(1, 1)
    asleep = sleepy(Counts(1, 1), quiet, memory=almost.memory, now=350.0)
    assert asleep.desired == NOTHING
    still = sleepy(NOTHING, router(), memory=asleep.memory, now=400.0)
    assert still.desired == NOTHING
    woken = sleepy(NOTHING, router(held=3), router(held=1), memory=still.memory, now=410.0)
    assert woken.desired == Counts(1, 1)
    assert woken.reason == "woken: 4 requests held, 1 pod in each pool"
    starting = sleepy(Counts(1, 1), router(held=4), memory=woken.memory, now=420.0)
    assert starting.desired == Counts(1, 1)


@pytest.mark.parametrize(
    "report",
    [
        router(open_requests=1),
        router(held=1),
        router(*pool("prefill", 1, leases_held=1), *pool("decode", 1)),
        router(*pool("prefill", 1), *pool("decode", 1, num_running=1)),
        router(*pool("prefill", 1, num_waiting=1), *pool("decode", 1)),
    ],
)
def test_anything_going_on_keeps_both_awake(report: RouterReport) -> None:
    scaled = sleepy(Counts(1, 1), report, memory=WHOLE_PATIENCE, now=1e6)
    assert scaled.desired == Counts(1, 1)
    assert scaled.memory.busy_at == 1e6


def test_requests_that_begin_and_end_between_two_looks_keep_both_awake() -> None:
    quiet = router(*pool("prefill", 1), *pool("decode", 1))
    told = msgspec.structs.replace(quiet, quiet_s=2.0)
    scaled = sleepy(Counts(1, 1), quiet, told, memory=WHOLE_PATIENCE, now=1e6)
    assert (scaled.desired, scaled.memory.busy_at) == (Counts(1, 1), 1e6 - 2)
    later = msgspec.structs.replace(quiet, quiet_s=float(PATIENCE))
    assert sleepy(Counts(1, 1), later, memory=scaled.memory, now=1e6 + 298).desired == NOTHING


def test_a_ready_engine_that_no_router_lists_keeps_both_awake() -> None:
    lost = router(*pool("prefill", 1), engine_report("decode", 0, listed=False))
    assert sleepy(Counts(1, 1), lost, memory=WHOLE_PATIENCE, now=1e6).desired == Counts(1, 1)


def test_a_service_does_not_fall_asleep_while_another_revision_has_pods() -> None:
    quiet = router(*pool("prefill", 1), *pool("decode", 1))
    awake = scale(
        Counts(1, 1), quiet, prefill=SLEEPY_PREFILL, decode=SLEEPY_DECODE, rolls=True, now=1e6
    )
    assert (awake.desired, awake.memory.busy_at) == (Counts(1, 1), 1e6)


@pytest.mark.parametrize("ready", [NOTHING, Counts(1, 0), Counts(0, 1)])
def test_pods_that_load_for_longer_than_any_patience_are_not_put_to_sleep(ready: Counts) -> None:
    loading = scale(
        Counts(1, 1), router(), prefill=SLEEPY_PREFILL, decode=SLEEPY_DECODE, ready=ready, now=1e6
    )
    assert loading.desired == Counts(1, 1)
    assert loading.memory.busy_at == 1e6, "patience begins when they are ready"


def test_one_pool_that_may_not_sleep_keeps_the_other_awake() -> None:
    quiet = router(*pool("prefill", 1), *pool("decode", 1))
    scaled = scale(Counts(1, 1), quiet, prefill=SLEEPY_PREFILL, now=1e6)
    assert scaled.desired == Counts(1, 1)


# Any load.

loads = st.builds(
    loaded,
    st.just(4),
    st.just(4),
    st.integers(0, 100_000),
    st.floats(0, 4),
    st.integers(0, 60),
)
wishes = st.builds(Counts, st.integers(1, 20), st.integers(1, 20))


@given(
    sleeps=st.booleans(),
    start=wishes | st.just(NOTHING),
    events=st.lists(
        st.tuples(loads | st.just(router()) | st.just(router(held=2)) | st.none(),
                  st.integers(1, 200)),
        max_size=25,
    ),
)  # fmt: skip
def test_bounds_hold_and_no_pool_is_ever_alone(
    sleeps: bool, start: Counts, events: list[tuple[RouterReport | None, int]]
) -> None:
    prefill, decode = (SLEEPY_PREFILL, SLEEPY_DECODE) if sleeps else (PREFILL, DECODE)
    wanted, memory, now = start, Memory(), 0.0
    for report, seconds in events:
        now += seconds
        scaled = scale(
            wanted, *([report] if report else []), prefill=prefill, decode=decode,
            ready=NOTHING, memory=memory, now=now,
        )  # fmt: skip
        p, d = scaled.desired.prefill, scaled.desired.decode
        assert (p == 0) == (d == 0)
        assert sleeps or p
        assert p <= min(20, 2 * max(1, wanted.prefill) + 1)
        assert d <= min(20, 2 * max(1, wanted.decode) + 1)
        assert len(scaled.memory.prefill) <= 20
        wanted, memory = scaled.desired, scaled.memory


@given(
    start=wishes,
    tokens=st.integers(0, 100_000),
    kv=st.floats(0.0, 30.0),
    waiting=st.integers(0, 60),
)
def test_a_constant_load_settles_and_stays(
    start: Counts, tokens: int, kv: float, waiting: int
) -> None:
    """The load is spread over the pods there are, as it is in life."""
    wanted, memory, seen = start, Memory(), []
    for number in range(60):
        report = loaded(wanted.prefill, wanted.decode, tokens, kv, waiting)
        scaled = scale(wanted, report, memory=memory, now=number * 60.0)
        wanted, memory = scaled.desired, scaled.memory
        seen.append(wanted)
    assert len(set(seen[30:])) == 1
    # Up, perhaps, then down, perhaps: never up again after a step down.
    for role in ("prefill", "decode"):
        numbers = [counts.of(role) for counts in seen]
        peak = numbers.index(max(numbers))
        assert numbers[peak:] == sorted(numbers[peak:], reverse=True)


@given(wanted=wishes, report=loads, data=st.data())
def test_lost_reports_never_scale_down(
    wanted: Counts, report: RouterReport, data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from(["router", "all", "prefill", "decode"]))
    if lost in ("prefill", "decode"):
        seen = [e for e in report.engines if e.role != lost] + pool(lost, wanted.of(lost) - 1)
        scaled = scale(
            wanted, msgspec.structs.replace(report, engines=seen), memory=NOTHING_HELD_BACK, now=1e6
        )
        assert scaled.desired.of(lost) >= wanted.of(lost)
        return
    reports = [] if lost == "all" else [report]
    scaled = scale(wanted, *reports, unreachable=1, memory=NOTHING_HELD_BACK, now=1e6)
    assert scaled.desired.prefill >= wanted.prefill
    assert scaled.desired.decode >= wanted.decode


@given(
    wanted=wishes,
    low=st.tuples(st.integers(0, 90_000), st.floats(0, 4), st.integers(0, 60)),
    more=st.tuples(st.integers(0, 90_000), st.floats(0, 4), st.integers(0, 60)),
)
def test_more_load_never_means_fewer_pods(
    wanted: Counts, low: tuple[int, float, int], more: tuple[int, float, int]
) -> None:
    less, greater = (
        scale(wanted, loaded(4, 4, *load), ready=NOTHING, memory=NOTHING_HELD_BACK).desired
        for load in (low, (low[0] + more[0], min(4.0, low[1] + more[1]), low[2] + more[2]))
    )
    assert less.prefill <= greater.prefill
    assert less.decode <= greater.decode
