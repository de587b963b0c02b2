"""A full engine is spared for a moment, and no longer."""

from __future__ import annotations

import pytest

from diptych_protocol import SchedulerStats
from diptych_router.engines.health_book import REMEMBERED_S, FullEngines

BEFORE = SchedulerStats(num_waiting=4)


@pytest.mark.parametrize(
    ("reported", "seconds", "full"),
    [
        (BEFORE, 0.0, True),
        (BEFORE, REMEMBERED_S / 2, True),
        (BEFORE, REMEMBERED_S, False),
        (SchedulerStats(num_waiting=4), 0.1, True),
        (SchedulerStats(num_waiting=5), 0.1, True),
        (SchedulerStats(num_waiting=3), 0.1, False),
        (None, 0.1, False),
    ],
    ids=["at once", "a moment later", "in time", "as many wait", "more wait", "fewer", "gone"],
)
def test_a_refusal_counts_for_a_moment_or_until_there_is_room(
    reported: SchedulerStats | None, seconds: float, full: bool
) -> None:
    told: dict[str, SchedulerStats | None] = {"a": BEFORE}
    engines = FullEngines(told.get)
    assert engines.now(5.0) == set()
    engines.refused("a", 5.0)
    told["a"] = reported
    assert engines.now(5.0 + seconds) == ({"a"} if full else set())
    assert engines.now(5.0 + seconds + REMEMBERED_S) == set()


def test_an_engine_that_refused_though_nobody_waited_has_room_with_the_next_report() -> None:
    told: dict[str, SchedulerStats | None] = {"a": SchedulerStats()}
    engines = FullEngines(told.get)
    engines.refused("a", 0.0)
    assert engines.now(0.1) == {"a"}
    told["a"] = SchedulerStats()
    assert engines.now(0.1) == set()
