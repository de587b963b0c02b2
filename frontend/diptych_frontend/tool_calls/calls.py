"""A call of a tool, and what the formats share in order to read one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from diptych_frontend.reasoning.splitter import certain_length
from diptych_protocol import UNREADABLE, InvalidRequestError

MAX_CALL: Final = 256 << 10
"""A text with more characters than this is no call."""
MAX_BEGIN: Final = 256
"""The beginning of a call, with the name of its function and blanks, is in so many characters."""
FUNCTION_NAME: Final = r"[a-zA-Z0-9_.-]{1,64}"

Tools = Mapping[str, Mapping[str, Any]]
"""The tools of a request: the name of a function -> the schema of its parameters."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments: str
    """A JSON object."""


Pieces = list[str | ParsedCall]
"""Text and calls of an answer, in their order; no text follows another."""


class WrittenCall(msgspec.Struct):
    """A call as models write it; some write `parameters` for `arguments`."""

    name: str
    arguments: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None


class Ended(NamedTuple):
    """How a possible call has ended."""

    length: int
    """The number of its characters."""
    calls: list[ParsedCall] | None
    """None: it is no call, and remains text."""


class OpenCall(Protocol):
    """The beginning of a possible call."""

    def end(self, text: str) -> Ended | None:
        """Return where it ends; None while that is not known.

        text: everything from its first character on. It only grows from one call of this method to
        the next, in any pieces.
        """

    def unfinished(self, text: str) -> list[ParsedCall] | None:
        """Return what it is if the answer ends before it does: calls that lack no more than the
        marker at their end, none for an unfinished call, and None for what may be text."""


class Marker:
    """See `OpenCall`: a marker around calls that has no meaning of its own."""

    def __init__(self, marker: str) -> None:
        self._length = len(marker)

    def end(self, text: str) -> Ended:
        return Ended(self._length, [])

    def unfinished(self, text: str) -> None:
        """There is no such text: it ends at once."""


class BetweenMarkers:
    """See `OpenCall`: a call, or several, between a marker at the beginning and one at the end."""

    def __init__(
        self,
        begin: str,
        end: str,
        read: Callable[[str], ParsedCall | list[ParsedCall] | None],
        inside: str = "",
    ) -> None:
        """read: parses the text between the markers as calls, if it is that.

        inside: how that text begins.
        """
        self._begin, self._end, self._read, self._inside = len(begin), end, read, inside
        self._searched = self._begin

    def end(self, text: str) -> Ended | None:
        found = text.find(self._end, self._searched)
        if found < 0:
            self._searched = max(self._begin, len(text) - len(self._end) + 1)
            return None if len(text) <= MAX_CALL + len(self._end) else Ended(MAX_CALL, None)
        if found > MAX_CALL:
            return Ended(MAX_CALL, None)
        return Ended(found + len(self._end), self._calls(text[self._begin : found]))

    def unfinished(self, text: str) -> list[ParsedCall] | None:
        written = text[self._begin :]
        written = written[: certain_length(written, (self._end,))]
        calls = self._calls(written)
        if calls is not None:
            return calls
        return [] if may_begin(written, (self._inside,)) else None

    def _calls(self, written: str) -> list[ParsedCall] | None:
        read = self._read(written)
        return [read] if isinstance(read, ParsedCall) else read


def may_begin(text: str, beginnings: Iterable[str]) -> bool:
    """Whether a text, blanks aside, begins like one of these, as far as it goes."""
    written = "".join(text[:MAX_BEGIN].split())
    return any(each[: len(written)] == written[: len(each)] for each in beginnings)


def call_of_json(written: str) -> ParsedCall | None:
    """Parse a call that is one JSON object; None for anything else."""
    try:
        return called(msgspec.json.decode(written, type=WrittenCall))
    except UNREADABLE:
        return None


def calls_of_json(written: str) -> list[ParsedCall] | None:
    """Parse calls in a JSON list; None for anything else."""
    try:
        calls = msgspec.json.decode(written, type=list[WrittenCall])
    except UNREADABLE:
        return None
    return [called(call) for call in calls] or None


def call_of(name: str, arguments: str) -> ParsedCall | None:
    """Return the call of a function with arguments in JSON; None if either is invalid."""
    if not re.fullmatch(FUNCTION_NAME, name):
        return None
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except UNREADABLE:
        return None
    return called(WrittenCall(name, given))


def called(call: WrittenCall) -> ParsedCall:
    arguments = call.parameters if call.arguments is None else call.arguments
    return ParsedCall(call.name, msgspec.json.encode(arguments or {}).decode())


def json_of(value: object, field: str = "tools") -> str:
    """Return a part of a request in JSON. Raises `InvalidRequestError`, naming its field."""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise InvalidRequestError(f"{field}: nested too deeply", param=field) from None
