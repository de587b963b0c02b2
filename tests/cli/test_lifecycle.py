"""The state machine of one local pod."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.laptop.lifecycle import (
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    MAX_FAILED_STARTS,
    STABLE_S,
    Phase,
    PodLife,
)


def phase_of(life: PodLife) -> Phase:
    """What its phase is now, whatever was asserted of it before."""
    return life.phase


def ready_life(now: float = 0.0) -> PodLife:
    life = PodLife()
    life.started(now)
    life.probed(True, now)
    return life


def test_a_pod_is_ready_once_its_probe_says_so() -> None:
    life = PodLife()
    assert phase_of(life) is Phase.PENDING
    life.started(1.0)
    life.probed(False, 2.0)
    assert phase_of(life) is Phase.STARTING
    life.probed(True, 3.0)
    assert (life.phase, life.changed_at, life.restarts) == (Phase.READY, 3.0, 0)


def test_one_failed_probe_is_forgiven_and_a_row_of_them_is_not() -> None:
    life = ready_life()
    for ok in (False, False, True, False, False):
        life.probed(ok, 1.0)
        assert life.phase is Phase.READY
    life.probed(False, 1.0)
    assert phase_of(life) is Phase.NOT_READY
    life.probed(True, 2.0)
    assert phase_of(life) is Phase.READY


def test_the_delay_doubles_up_to_a_limit() -> None:
    life = ready_life()
    delays = []
    for _ in range(8):
        delays.append(life.exited(1.0))
        life.started(1.0)
    assert delays == [1, 2, 4, 8, 16, LONGEST_DELAY_S, LONGEST_DELAY_S, LONGEST_DELAY_S]
    assert life.restarts == 8


@pytest.mark.parametrize(("ready_for_s", "delay"), [(STABLE_S - 1, 4.0), (STABLE_S, FIRST_DELAY_S)])
def test_a_stable_run_forgives_earlier_crashes(ready_for_s: float, delay: float) -> None:
    life = ready_life()
    for _ in range(2):
        life.exited(0.0)
        life.started(0.0)
    life.probed(True, 10.0)
    assert life.exited(10.0 + ready_for_s) == delay


def test_a_pod_that_was_never_ready_is_given_up() -> None:
    life = PodLife()
    answers = []
    for _ in range(MAX_FAILED_STARTS):
        life.started(0.0)
        answers.append(life.exited(0.0))
    assert answers == [1.0, 2.0, None]
    assert life.phase is Phase.CRASHED


@given(st.lists(st.tuples(st.sampled_from(["start", "ok", "fail", "exit"]), st.floats(0, 100))))
def test_whatever_happens_delays_stay_in_bounds(events: list[tuple[str, float]]) -> None:
    life, now, running = PodLife(), 0.0, False
    for event, seconds in events:
        now += seconds
        if event == "start" and not running and life.phase is not Phase.CRASHED:
            life.started(now)
            running = True
        elif event in ("ok", "fail") and running:
            life.probed(event == "ok", now)
        elif event == "exit" and running:
            delay, running = life.exited(now), False
            assert (delay is None) == (life.phase is Phase.CRASHED)
            assert delay is None or FIRST_DELAY_S <= delay <= LONGEST_DELAY_S
            assert delay is not None or not life.ever_ready
