"""When a router's process is started again."""

from __future__ import annotations

from diptych_router.workers.supervisor import FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S, pause_s


def test_the_pause_doubles_for_processes_that_end_soon_and_has_a_limit() -> None:
    pauses, pause = [], 0.0
    for _ in range(9):
        pause = pause_s(1.0, pause)
        pauses.append(pause)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses == sorted(pauses)
    assert pauses[-2:] == [LONGEST_PAUSE_S] * 2


def test_a_long_life_is_forgiven() -> None:
    assert pause_s(STEADY_S, LONGEST_PAUSE_S) == FIRST_PAUSE_S
