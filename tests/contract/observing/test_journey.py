"""The stations of requests, as the scheduler tells them: row M6."""

from __future__ import annotations

import itertools

import pytest
from engine_kit.core import core_request, make_core
from engine_kit.toy_engine import ToyRunner, make_request, make_scheduler, run
from hypothesis import given
from hypothesis import strategies as st

from diptych_engine.scheduling.journey import MAX_EVENTS, JourneyLog
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_protocol import FinishReason, KVTransferParams, RequestJourneyEvent
from diptych_protocol import RequestJourneyEventType as Station


def followed(num_blocks: int, **changes: object) -> tuple[Scheduler, JourneyLog]:
    ticks = itertools.count()
    log = JourneyLog(clock=lambda: float(next(ticks)))
    return make_scheduler(num_blocks, journey=log, **changes), log


def events_of(log: JourneyLog, name: str, client: bytes = b"") -> list[RequestJourneyEvent]:
    return [event for event in log.take().get(client, []) if event.request_id == name]


def stations(events: list[RequestJourneyEvent]) -> list[str]:
    return [event.event_type.name for event in events]


def test_contract_M06_a_request_comes_by_every_station_in_order() -> None:
    scheduler, log = followed(16)
    scheduler.add(make_request("r", list(range(12)), 3))
    run(scheduler, ToyRunner())
    events = events_of(log, "r")
    assert stations(events) == [
        "QUEUED", "SCHEDULED", "CHUNK", "FIRST_TOKEN", "FINISHED", "DEPARTED",
    ]  # fmt: skip
    assert [e.scheduler_step for e in events] == [0, 0, 1, 2, 4, 4]
    assert [e.prefill_done_tokens for e in events] == [0, 0, 8, 12, 12, 12]
    assert [e.decode_done_tokens for e in events] == [0, 0, 0, 1, 3, 3]
    assert [e.phase for e in events] == ["PREFILL"] * 3 + ["DECODE"] * 3
    assert {(e.prefill_total_tokens, e.decode_max_tokens) for e in events} == {(12, 3)}
    assert [e.schedule_kind for e in events] == [None, "FIRST", None, None, None, None]
    assert [e.finish_status for e in events] == [None, None, None, None, "length", "length"]


def test_contract_M06_each_part_of_a_long_prompt_is_a_station_but_the_last() -> None:
    scheduler, log = followed(16)
    scheduler.add(make_request("r", list(range(20)), 2))
    run(scheduler, ToyRunner())
    events = events_of(log, "r")
    assert stations(events)[:5] == ["QUEUED", "SCHEDULED", "CHUNK", "CHUNK", "FIRST_TOKEN"]
    assert [e.prefill_done_tokens for e in events[2:5]] == [8, 16, 20]


def test_contract_M06_progress_survives_preemption() -> None:
    scheduler, log = followed(6, enable_prefix_caching=False)
    scheduler.add(make_request("old", [1] * 8, 12))
    scheduler.add(make_request("young", [2] * 8, 12))
    run(scheduler, ToyRunner())
    events = [e for e in events_of(log, "young") if e.event_type is not Station.CHUNK]
    assert stations(events)[:5] == ["QUEUED", "SCHEDULED", "FIRST_TOKEN", "PREEMPTED", "SCHEDULED"]
    preempted, resumed = events[3], events[4]
    assert preempted.num_preemptions_so_far == 1
    assert resumed.schedule_kind == "RESUME"
    assert resumed.prefill_done_tokens == preempted.prefill_done_tokens == 8
    assert resumed.decode_done_tokens == preempted.decode_done_tokens > 0


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), min_size=1, max_size=6),
    st.integers(5, 9),
)
def test_contract_M06_times_and_progress_never_go_back(
    work: list[tuple[int, int]], num_blocks: int
) -> None:
    scheduler, log = followed(num_blocks)
    for i, (length, count) in enumerate(work):
        scheduler.add(make_request(str(i), [i] * length, count))
    run(scheduler, ToyRunner())
    taken = log.take()[b""]
    for i in range(len(work)):
        events = [e for e in taken if e.request_id == str(i)]
        assert stations(events)[0] == "QUEUED"
        assert stations(events)[-2:] == ["FINISHED", "DEPARTED"]
        assert stations(events).count("FIRST_TOKEN") == 1
        kinds = [e.schedule_kind for e in events if e.event_type is Station.SCHEDULED]
        assert kinds == ["FIRST"] + ["RESUME"] * stations(events).count("PREEMPTED")
        for a, b in itertools.pairwise(events):
            assert a.ts_monotonic < b.ts_monotonic or b.event_type is Station.DEPARTED
            assert a.prefill_done_tokens <= b.prefill_done_tokens
            assert a.decode_done_tokens <= b.decode_done_tokens
            assert a.num_preemptions_so_far <= b.num_preemptions_so_far
    assert log.take() == {}


@pytest.mark.parametrize(("ok", "station"), [(True, "KV_DONE"), (False, "KV_FAIL")])
def test_contract_M06_a_hand_off_has_stations_of_its_own(ok: bool, station: str) -> None:
    scheduler, log = followed(16)
    transfer = KVTransferParams(
        do_remote_prefill=True, remote_num_tokens=8, remote_block_ids=[[0, 1]]
    )
    request = make_request("d", list(range(8)), 3, kv_transfer=transfer)
    request.token_ids.append(9)
    scheduler.add(request)
    scheduler.schedule()
    scheduler.load_ended("d", ok=ok)
    assert stations(events_of(log, "d")) == ["QUEUED", "KV_WAIT", station]


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_contract_M06_an_abort_is_an_end_at_any_point(num_steps: int) -> None:
    scheduler, log = followed(16)
    runner, request = ToyRunner(), make_request("r", list(range(12)), 3)
    scheduler.add(request)
    for _ in range(num_steps):
        plan = scheduler.schedule()
        scheduler.update(plan, runner.execute(plan))
    scheduler.finish(request, FinishReason.ABORT)
    *_, finished, departed = events_of(log, "r")
    assert stations([finished, departed]) == ["FINISHED", "DEPARTED"]
    assert departed.finish_status == "abort"


def test_contract_M06_each_client_is_told_of_its_own_requests() -> None:
    core = make_core(journey_events=True)
    for name in ("a", "b"):
        core.add(core_request(name, [1, 2, 3], max_tokens=2), name.encode())
    while core.has_work:
        core.finish_step(*core.start_step())
    log = core.scheduler.journey
    assert log is not None
    taken = log.take()
    assert {client: {e.request_id for e in events} for client, events in taken.items()} == {
        b"a": {"a"},
        b"b": {"b"},
    }


def test_contract_M06_what_nobody_takes_is_bounded() -> None:
    log = JourneyLog()
    for i in range(MAX_EVENTS + 5):
        log.record(make_request(str(i), [1], 1), Station.QUEUED, 0)
    assert len(log.take()[b""]) == MAX_EVENTS


def test_contract_M06_without_the_setting_nothing_is_recorded() -> None:
    core = make_core()
    assert core.scheduler.journey is None


def test_what_a_preempted_request_finds_of_its_own_was_not_cached() -> None:
    scheduler, log = followed(6)
    old, young = make_request("old", [1] * 8, 12), make_request("young", [2] * 8, 12)
    scheduler.add(old)
    scheduler.add(young)
    run(scheduler, ToyRunner())
    assert scheduler.stats.num_preemptions > 0
    assert scheduler.stats.prefix_cache_hits > 0, "it found what it had computed before"
    assert (old.num_cached_tokens, young.num_cached_tokens) == (0, 0)
    first = [event for event in log.take()[b""] if event.schedule_kind == "FIRST"]
    assert [event.prefill_done_tokens for event in first] == [0, 0]
