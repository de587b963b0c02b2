"""Times of the week in which upgrades may begin, such as `Sat,Sun 01:00-05:00 Europe/Berlin`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Final, Self
from zoneinfo import ZoneInfo

EXAMPLE: Final = "Sat,Sun 01:00-05:00 Europe/Berlin"
DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY = f"(?:{'|'.join(DAYS)})"
_SOME = f"{_DAY}(?:-{_DAY})?"
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
PATTERN: Final = f"^({_SOME}(?:,{_SOME})*) ({_TIME})-({_TIME}|24:00) ([A-Za-z0-9_+/-]+)$"
"""The chart's schema has it too."""


@dataclass(frozen=True, slots=True)
class RolloutWindow:
    days: frozenset[int]
    """On which it begins; Monday is 0."""
    begin: timedelta
    """Since midnight, by the clocks of the zone."""
    end: timedelta
    """The same; more than a day if it is on the next one."""
    zone: ZoneInfo

    @classmethod
    def read(cls, text: str) -> Self:
        """Raises `argparse.ArgumentTypeError`."""
        found = re.fullmatch(PATTERN, text)
        if found is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not like {EXAMPLE!r}")
        days, *times, name = found.groups()
        try:
            zone = ZoneInfo(name)
        except (KeyError, OSError, ValueError) as exc:  # OSError: a folder of zones
            raise argparse.ArgumentTypeError(
                f"{text!r}: there is no time zone {name}; write one like that of {EXAMPLE!r}"
            ) from exc
        begin, end = (timedelta(hours=int(each[:2]), minutes=int(each[3:])) for each in times)
        following = timedelta(days=end <= begin)
        return cls(frozenset(_days(days)), begin, end + following, zone)

    def near(self, now: datetime) -> Iterator[tuple[datetime, datetime]]:
        """Begin and end of the windows from yesterday's on, for two weeks.

        A time that a clock shows twice is the first of both; one that it leaves out is as much
        later as the clock was put forward.
        """
        midnight = datetime.combine(now.astimezone(self.zone), time(), self.zone)
        for days in range(-1, 15):
            day = midnight + timedelta(days)  # by the clocks, as what is added below
            if day.weekday() in self.days:
                yield (day + self.begin).astimezone(UTC), (day + self.end).astimezone(UTC)


def _days(text: str) -> Iterator[int]:
    for some in text.split(","):
        first, last = (DAYS.index(day) for day in (some[:3], some[-3:]))
        yield from (day % 7 for day in range(first, first + (last - first) % 7 + 1))


def opens(windows: Sequence[RolloutWindow], now: datetime) -> datetime | None:
    """Return when the next window begins; None within one, and if there are none."""
    spans = [span for window in windows for span in window.near(now)]
    ahead = [begin for begin, end in spans if max(begin, now) < end]
    return None if any(begin <= now for begin in ahead) else min(ahead, default=None)
