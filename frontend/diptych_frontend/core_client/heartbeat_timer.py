"""When a core's loop says that it turns, and for how long a step or a call may keep it silent.

The loop itself sends the beats, so they end when the loop hangs, while ZMQ's own threads keep the
socket alive. Every beat promises when the next word comes. A loop is silent during a step, and on a
slow machine a step takes seconds. So the loop promises more time before a step that may be long: by
how long steps of its size took here (`StepTimes`). Pure: time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Final

from diptych_protocol import SchedulerStats
from diptych_protocol.wire import Heartbeat

BEAT_S: Final = 0.5
"""The time between two beats of a loop that turns."""
WITHIN_S: Final = 1.0
"""A beat promises the next word within this time. Steps up to `WITHIN_S - BEAT_S` need no promise
of their own."""
MARGIN: Final = 4.0
"""A step may take so many times as long as the longest one of its size did."""
FADING: Final = 0.98
"""How much of the longest time of a size is left after the next step of this size."""
LONGEST_STEP_S: Final = 60.0
"""No step takes longer; a front-end gives its core up after the same time. The first step of a size
may take so long: it may compile kernels, or get memory."""
CALL_S: Final = 600.0
"""Calls that load, save or change weights may take so long."""
QUICK_CALLS: Final = frozenset(
    {
        "announce_kv_transfer", "describe", "drain", "drain_report", "hand_off",
        "reject_kv_transfer", "stats",
    }
)  # fmt: skip
"""Calls that routers make all the time; they only look something up or note something."""
MAX_FOLLOWERS: Final = 256
"""A client beyond them hears no beats, and asks for statistics instead."""
MAX_NAME: Final = 64
"""Characters of a follower's name that count."""
SIZES: Final = 40
"""Sizes of steps are powers of two of their numbers of tokens."""


class StepTimes:
    """The longest recent steps, by size."""

    def __init__(self) -> None:
        self._longest = [0.0] * SIZES

    def took(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens has ended."""
        size = min(tokens.bit_length(), SIZES - 1)
        self._longest[size] = max(seconds, self._longest[size] * FADING)

    def bound_s(self, tokens: int) -> float:
        """A step of so many tokens that takes longer than these seconds hangs."""
        longest = self._longest[min(tokens.bit_length(), SIZES - 1)]
        return min(MARGIN * longest, LONGEST_STEP_S) if longest else LONGEST_STEP_S


class HeartbeatTimer:
    """Who hears the beats of one core, and when the next one is due."""

    def __init__(self) -> None:
        self.followers: dict[bytes, str] = {}
        """Client -> its name, in the order of names."""
        self.steps = StepTimes()
        self._role = ""
        self._due = 0.0
        self._promised = 0.0
        """Until when the last word said that there may be silence."""

    def follow(self, client: bytes, name: object = "", role: object = None) -> bool:
        """A client wants to hear the beats; False: too many do already. The next one is due, and
        from now on beats say the role, if there is one."""
        if client not in self.followers and len(self.followers) >= MAX_FOLLOWERS:
            return False
        self.followers[client] = str(name)[:MAX_NAME]
        self.followers = dict(sorted(self.followers.items(), key=itemgetter(1)))
        self._due = 0.0
        if role is not None:
            self._role = str(role)[:MAX_NAME]
        return True

    def forget(self, client: bytes) -> None:
        self.followers.pop(client, None)

    def numbers(self) -> dict[str | bytes, int]:
        """Return which one each follower is, by its name, or itself if it has none. One that has
        connected again may be here twice until its former connection is found to be gone."""
        names = dict.fromkeys(name or client for client, name in self.followers.items())
        return {name: number for number, name in enumerate(names)}

    def addressed(
        self, heartbeat: Heartbeat, num_received: Callable[[bytes], int]
    ) -> Iterator[tuple[bytes, int]]:
        """Return each follower, with the number of requests that came from it. Meanwhile the
        heartbeat says which one this is, and how many there are of all."""
        numbers, followers = self.numbers(), list(self.followers.items())
        received = [num_received(client) for client, _ in followers]
        heartbeat.followers, heartbeat.requests = len(numbers), sum(received)
        heartbeat.role = self._role
        for (client, name), own in zip(followers, received, strict=True):
            heartbeat.follower = numbers[name or client]
            yield client, own

    def wait_s(self, now: float) -> float:
        """How long the loop may wait for messages."""
        return max(self._due - now, 0.0)

    def beat(self, now: float) -> Heartbeat | None:
        """What the loop says between two steps; None: it is not time yet."""
        if now < self._due:
            return None
        self._due, self._promised = now + BEAT_S, now + WITHIN_S
        return Heartbeat(WITHIN_S)

    def before_silence(
        self, now: float, seconds: float, *, in_call: bool = False
    ) -> Heartbeat | None:
        """What the loop says before it may be silent for so long; None: it has promised as much.

        The next beat is then due as soon as the loop turns again.
        """
        if now + seconds <= self._promised and not in_call:
            return None
        self._due, self._promised = 0.0, now + seconds
        return Heartbeat(seconds, in_call)


LATE_LOOK_S: Final = 0.5
"""If a look comes this much later than planned, this process stood still, and messages may be
unread."""


def stood_still_s(planned: float, now: float) -> float:
    """Return for how long this process stood still before a look at `now`; 0 if it did not."""
    late_s = now - planned
    return late_s if late_s > LATE_LOOK_S else 0.0


class Pulse:
    """What a client knows of one core's progress, to distinguish a busy core from one that hangs.

    A core answers between two steps, so one in a long step is as silent as one that hangs; only
    time distinguishes them. Time counts from the first question that showed no progress, so silence
    without a question does not count.
    """

    def __init__(self) -> None:
        self._steps = -1
        self._doubted_since: float | None = None

    def asked(self, now: float) -> None:
        """Record a question to the core."""
        if self._doubted_since is None:
            self._doubted_since = now

    def heard(self, stats: SchedulerStats) -> None:
        """Record a report of the core. The core is well if it has nothing to do or has made steps;
        while paused, it makes none on purpose."""
        has_work = stats.num_running + stats.num_waiting > 0 and not stats.paused
        if not has_work or stats.steps != self._steps:
            self._doubted_since = None
        self._steps = stats.steps

    def excuse(self) -> None:
        """Record that there was a reason for the silence so far."""
        self._doubted_since = None

    def excuse_seconds(self, seconds: float, now: float) -> None:
        """Record that there was a reason for this many of the seconds so far."""
        if self._doubted_since is not None:
            self._doubted_since = min(now, self._doubted_since + seconds)

    def doubtful_s(self, now: float) -> float:
        """Return for how many seconds there has been no sign of progress."""
        return 0.0 if self._doubted_since is None else now - self._doubted_since
