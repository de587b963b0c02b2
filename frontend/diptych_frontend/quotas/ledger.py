"""Counts the tokens of keys. It performs no I/O, and the caller passes the time.

A request first reserves the most tokens that it can take, and in the end gives back those that it
did not. So requests that run at the same time cannot exceed a limit together, and none is cut off.
Its tokens count in the minute in which it began, and in the day and month in which it ended. Clocks
that differ turn no window back, unless one has been so far ahead that it was wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final, NamedTuple

import msgspec

from diptych_protocol import UNREADABLE, InvalidRequestError

Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class Limits(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Prompt and answer count, whether cached or not. None: as many as one likes."""

    tokens_per_minute: Tokens | None = None
    tokens_per_month: Tokens | None = None
    token_budget: Tokens | None = None
    """A limit for all time."""

    def part(self, of: int) -> Limits:
        """Return the part of each of so many routers that count alone."""
        each = msgspec.structs.asdict(self).items()
        return Limits(**{name: limit and max(limit // of, 1) for name, limit in each})

    def and_of(self, other: Limits) -> Limits:
        """Return the smaller one of each limit."""
        pairs = zip(*map(msgspec.structs.astuple, (self, other)), strict=True)
        return Limits(*(min(filter(None, pair), default=None) for pair in pairs))


NO_LIMITS = Limits()


def read_limits(lines: bytes) -> Limits:
    """Read lines such as `tokensPerMinute: 100000`. Raises `InvalidRequestError`, which quotes
    nothing: the lines may be another key, and the words go into logs and a status."""
    fields: dict[str, str] = {}
    try:
        for line in lines.decode("ascii").split("\n"):
            name, _, number = (part.strip() for part in line.partition(":"))
            if name in fields:
                raise ValueError
            fields[name] = number
        if lines:
            return msgspec.convert(fields, Limits, strict=False)
    except (ValueError, *UNREADABLE):
        names = ", ".join(Limits.__struct_encode_fields__)
        raise InvalidRequestError(f"each line is to be one of {names}, and its number") from None
    return NO_LIMITS


MINUTE_S: Final = 60
SKEW_S: Final = 600
DAY_S: Final = 86_400
"""A minute that began so much ahead, and a day or month that did by a day, began by a wrong clock.
They end at once: else nobody would be let in, and no day written, before their time has come."""


class Window(NamedTuple):
    """What is left of one limit of a key."""

    per: str
    """minute, month, or ever."""
    limit: int
    left: int
    resets_s: float
    """Seconds until there is as much as the limit again; infinite for a budget."""


@dataclass(slots=True, eq=False)
class Bill:
    """The tokens of one request."""

    key: str
    reserved: int = 0
    minute: int = 0
    """The number of the minute in which they were reserved; 0: none were."""
    prompt: int = 0
    generated: int = 0


class Grant(NamedTuple):
    """What came of a wish to reserve tokens."""

    bill: Bill
    windows: list[Window]
    """As they are then."""
    lacking: list[Window]
    """Those that have too few left. Then nothing is reserved."""


class Count(msgspec.Struct, omit_defaults=True):
    """What one key has used."""

    minute: int = 0
    of_minute: int = 0
    """Tokens of the requests that began in this minute: reserved ones while they run."""
    month: str = ""
    of_month: int = 0
    ever: int = 0
    requests: int = 0
    """This and the next two are of the ledger's day."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    held: dict[str, int] = {}
    """Router -> tokens that are reserved for its open requests."""
    held_of_minute: dict[str, int] = {}
    """The tokens of `held` that were reserved in this minute."""

    def windows(self, limits: Limits, now: float) -> list[Window]:
        """Return what is left of each limit that there is."""
        self._turn(now)
        date, held = datetime.fromtimestamp(now, UTC), sum(self.held.values())
        following = datetime(date.year + date.month // 12, date.month % 12 + 1, 1, tzinfo=UTC)
        minute_s = (self.minute + 1) * MINUTE_S - now
        month_s = following.timestamp() - now
        each = (
            ("minute", limits.tokens_per_minute, self.of_minute, minute_s),
            ("month", limits.tokens_per_month, self.of_month + held, month_s),
            ("ever", limits.token_budget, self.ever + held, math.inf),
        )
        return [
            Window(per, limit, max(limit - used, 0), resets_s)
            for per, limit, used, resets_s in each
            if limit is not None
        ]

    def settle(self, bill: Bill, router: str, now: float) -> None:
        """Count what a request has taken in the end."""
        self._turn(now)
        tokens = bill.prompt + bill.generated
        if bill.minute in (self.minute, 0):
            self.of_minute = max(self.of_minute + tokens - bill.reserved, 0)
            _lessen(self.held_of_minute, router, bill.reserved)
        _lessen(self.held, router, bill.reserved)
        self.of_month += tokens
        self.ever += tokens
        self.requests += tokens > 0
        self.prompt_tokens += bill.prompt
        self.generated_tokens += bill.generated

    def forget(self, router: str) -> None:
        """Give back what is reserved for a router that has ended."""
        self.held.pop(router, None)
        self.of_minute -= self.held_of_minute.pop(router, 0)

    def _turn(self, now: float) -> None:
        """Begin the windows anew whose time has come."""
        minute = int(now // MINUTE_S)
        if minute > self.minute or self.minute > (now + SKEW_S) // MINUTE_S:
            self.minute, self.of_minute, self.held_of_minute = minute, 0, {}
        if _month(now) > self.month:
            self.month, self.of_month = _month(now), 0
        elif self.month > _month(now + DAY_S):
            self.month = _month(now)


class DayOfKey(msgspec.Struct, frozen=True):
    """What a key used on a day: a line of the day's file."""

    day: str
    key: str
    requests: int
    prompt_tokens: int
    generated_tokens: int
    line: int
    lines: int
    """The number of lines in the file, so that none can be missing unnoticed."""


class Ledger(msgspec.Struct):
    """The counts of all keys."""

    day: str = ""
    """The day whose requests and tokens are counted, as 2026-11-28."""
    counts: dict[str, Count] = {}

    def of(self, key: str) -> Count:
        return self.counts.setdefault(key, Count())

    def reserve(self, key: str, tokens: int, limits: Limits, router: str, now: float) -> Grant:
        """Reserve tokens unless that would exceed a limit."""
        count, bill = self.of(key), Bill(key)
        lacking = [window for window in count.windows(limits, now) if window.left < tokens]
        if not lacking:
            bill.reserved, bill.minute = tokens, count.minute
            count.of_minute += tokens
            for held in (count.held, count.held_of_minute):
                held[router] = held.get(router, 0) + tokens
        return Grant(bill, count.windows(limits, now), lacking)

    def begin_day(self, now: float) -> list[DayOfKey]:
        """Begin the counts of a day anew if its time has come, and return those of the last one."""
        today = _day(now)
        if today <= self.day <= _day(now + DAY_S):
            return []
        used = {key: count for key, count in sorted(self.counts.items()) if count.requests}
        ended = [
            DayOfKey(self.day, key, c.requests, c.prompt_tokens, c.generated_tokens, at, len(used))
            for at, (key, c) in enumerate(used.items(), 1)
        ]
        for count in used.values():
            count.requests = count.prompt_tokens = count.generated_tokens = 0
        self.day = today
        return ended


def _month(now: float) -> str:
    return _day(now)[:7]


def _day(now: float) -> str:
    return f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d}"


def _lessen(held: dict[str, int], router: str, tokens: int) -> None:
    left = held.pop(router, 0) - tokens
    if left > 0:
        held[router] = left
