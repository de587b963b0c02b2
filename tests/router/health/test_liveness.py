"""An engine that hangs is told from one that has nothing to do, or a call to answer."""

from __future__ import annotations

from typing import Any

from diptych_protocol import SchedulerStats
from diptych_protocol.wire import Heartbeat
from diptych_router.engines.liveness import GRACE_S, HANGS_S, SILENT_S, Liveness


def stats(steps: int, num_running: int = 1) -> SchedulerStats:
    told = SchedulerStats()
    told.steps, told.num_running = steps, num_running
    return told


def beaten(**heartbeat: Any) -> Liveness:
    """An engine whose last heartbeat came at 0, and promised the next one within a second."""
    watched = Liveness()
    watched.beat(Heartbeat(1.0, **heartbeat), 0.0)
    return watched


def test_a_heartbeat_that_does_not_come_is_silence_and_in_the_end_the_engine_hangs() -> None:
    watched = beaten()
    assert watched.sends_heartbeats
    look_at = [0.0]
    while look_at[-1] < 1.0 + GRACE_S:
        assert not watched.judge(look_at[-1])
        look_at.append(look_at[-1] + watched.look(look_at[-1]))
    assert watched.judge(look_at[-1]) == ""
    watched.look(look_at[-1])
    assert watched.judge(look_at[-1]) == "missed a heartbeat"
    assert watched.judge(look_at[-1]) == "", "it is told once"
    assert watched.silent
    assert not watched.hangs(look_at[-1])
    assert watched.hangs(1.0 + HANGS_S)

    assert watched.beat(Heartbeat(1.0), 9.0), "it is to be judged at once"
    assert watched.judge(9.0) == "works again"
    assert not watched.silent
    assert not watched.hangs(9.0)


def test_a_loop_that_turns_and_makes_no_step_is_silent_but_does_not_hang() -> None:
    watched = beaten()
    watched.heard(stats(steps=5))
    for second in range(int(SILENT_S) + 2):
        watched.beat(Heartbeat(1.0), float(second))
        watched.heard(stats(steps=5))
    now = SILENT_S + 1.5
    assert watched.judge(now) == "has made no step for 10 s"
    assert not watched.hangs(now)
    watched.heard(stats(steps=6))
    assert watched.judge(now) == "works again"


def test_seconds_in_which_the_router_itself_stood_still_are_not_held_against_an_engine() -> None:
    watched = beaten()
    watched.heard(stats(steps=5))
    watched.beat(Heartbeat(1.0), 0.5)
    planned = 0.5 + watched.look(0.5)
    awake = planned + SILENT_S + 3.0
    look_again = awake + watched.look(awake)
    assert watched.judge(awake) == "", "what the engine said meanwhile is not read yet"
    while look_again < awake + SILENT_S:
        watched.beat(Heartbeat(1.0), look_again)
        watched.heard(stats(steps=5))
        look_again += watched.look(look_again)
    assert watched.judge(look_again) == "has made no step for 10 s"


def test_an_engine_without_work_makes_no_steps_and_is_well() -> None:
    watched = beaten()
    watched.heard(stats(steps=5, num_running=0))
    watched.asked(0.0)
    watched.heard(stats(steps=5, num_running=0))
    assert watched.judge(10 * SILENT_S) == ""


def test_a_call_that_begins_or_ends_is_a_moment_to_judge() -> None:
    watched = Liveness()
    assert not watched.beat(Heartbeat(1.0), 0.0)
    assert watched.beat(Heartbeat(1.0, in_call=True), 0.5)
    assert watched.in_call
    assert watched.beat(Heartbeat(1.0), 1.0)
    assert not watched.in_call
    assert not watched.beat(Heartbeat(1.0), 1.5)


def test_an_engine_that_sends_no_heartbeats_is_judged_by_what_it_answers() -> None:
    watched = Liveness()
    watched.asked(0.0)
    assert not watched.sends_heartbeats
    assert watched.judge(SILENT_S) == ""
    assert watched.judge(SILENT_S + 0.1) == "has made no step for 10 s"
