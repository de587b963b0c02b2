"""Busy is not stalled, and a silence in which nobody asked proves nothing."""

from __future__ import annotations

from collections.abc import Callable

from cases import each

from diptych_frontend.core_client.heartbeat_timer import Pulse
from diptych_protocol import SchedulerStats

Happening = Callable[[Pulse], None]


def asked(now: float) -> Happening:
    return lambda pulse: pulse.asked(now)


def heard(steps: int, running: int = 1, waiting: int = 0) -> Happening:
    stats = SchedulerStats(num_running=running, num_waiting=waiting, steps=steps)
    return lambda pulse: pulse.heard(stats)


def excused(seconds: float, now: float) -> Happening:
    return lambda pulse: pulse.excuse_seconds(seconds, now)


@each(
    ("happened", "doubtful_s"),
    [
        ([], 0),
        ([asked(10)], 90),
        ([asked(10), asked(50)], 90),
        ([asked(10), heard(5)], 0),
        ([asked(10), heard(5), asked(60), heard(6), asked(90)], 10),
        ([heard(5), asked(10), heard(5)], 90),
        ([heard(5), asked(10), heard(5), asked(20), heard(6)], 0),
        ([heard(5, 0, 3), asked(10), heard(5, 0, 3)], 90),
        ([heard(5, 0, 0), asked(10), heard(5, 0, 0)], 0),
        ([excused(30, now=60)], 0),
        ([asked(10), excused(30, now=60)], 60),
        ([asked(10), excused(70, now=60)], 40),
    ],
    ids=[
        "nobody asked", "no answer", "no answer to two questions", "an answer", "steps are made",
        "the same step", "a long step", "waiting only", "nothing to do",
        "nothing to excuse", "some seconds have a reason", "no excuse is for later",
    ],
)  # fmt: skip
def test_doubt_counts_from_the_first_question_without_progress(
    happened: list[Happening], doubtful_s: float
) -> None:
    pulse = Pulse()
    for happen in happened:
        happen(pulse)
    assert pulse.doubtful_s(100) == doubtful_s
