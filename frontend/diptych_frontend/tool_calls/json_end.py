"""Calls that end with the bracket that they begin with: a JSON object or list, or a list of Python,
in a text that is still growing."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import ClassVar, Final, NamedTuple

from diptych_frontend.tool_calls.calls import MAX_CALL, Ended, ParsedCall, Tools

MAX_DEPTH: Final = 100
"""Arguments with deeper nesting than this are refused."""

_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
"""What matters inside of a string, by its quotation mark."""
MAX_BLANKS: Final = 64


class JsonPart(NamedTuple):
    end: int
    """The position after it."""
    is_whole: bool
    """Whether its brackets are closed; otherwise it is too deep or too long."""


class JsonEnd:
    """Counts brackets outside of strings. It does not check that the JSON is valid."""

    OUTSIDE: ClassVar = re.compile(r'[\[\]{}"]')
    """Brackets and quotation marks."""

    def __init__(self, begin: int) -> None:
        """begin: the position of its first bracket."""
        self._begin = self._at = begin
        self._depth = 0
        self._quote = ""
        """The quotation mark of the string that is open; empty: none is."""

    def find(self, text: str) -> JsonPart | None:
        """Return the end; None while that is not known. text: as for `OpenCall.end`."""
        while (found := self._sign().search(text, self._at)) is not None:
            if found.end() - self._begin > MAX_CALL:
                return JsonPart(self._begin + MAX_CALL, False)
            sign = found.group()
            if sign == "\\":
                if found.end() == len(text):
                    self._at = found.start()
                    return None
                self._at = found.end() + 1
                continue
            self._at = found.end()
            if sign in _IN_STRING:
                self._quote = "" if self._quote else sign
                continue
            self._depth += 1 if sign in "[{(" else -1
            if self._depth == 0:
                return JsonPart(self._at, True)
            if self._depth > MAX_DEPTH:
                return JsonPart(self._at, False)
        if len(text) - self._begin > MAX_CALL:
            return JsonPart(self._begin + MAX_CALL, False)
        self._at = max(self._at, len(text))
        return None

    def _sign(self) -> re.Pattern[str]:
        return _IN_STRING[self._quote] if self._quote else self.OUTSIDE


class PythonEnd(JsonEnd):
    """Does the same for a list of Python, whose strings have two kinds of quotation marks."""

    OUTSIDE: ClassVar = re.compile(r"[\[\](){}\"']")


class BracketedCalls(ABC):
    """See `OpenCall`. A marker may stand before the bracket. Without one, only calls of the
    request's tools are calls; anything else is part of the answer."""

    BRACKET: ClassVar[str]
    END: ClassVar[type[JsonEnd]]

    def __init__(self, marker: str, tools: Tools) -> None:
        self._marker, self._tools = len(marker), tools
        self._begin: int | None = None
        self._inside = self.END(0)

    @abstractmethod
    def _read(self, written: str) -> list[ParsedCall] | None:
        """Return the calls between the brackets; None if it is anything else."""

    def end(self, text: str) -> Ended | None:
        if self._begin is None:
            rest = text[self._marker : self._marker + MAX_BLANKS].lstrip()
            if not rest and len(text) < self._marker + MAX_BLANKS:
                return None
            if not rest.startswith(self.BRACKET):
                return Ended(self._marker, None)  # a program, not a call
            self._begin = text.index(self.BRACKET, self._marker)
            self._inside = self.END(self._begin)
        part = self._inside.find(text)
        if part is None:
            return None
        calls = self._read(text[self._begin : part.end]) if part.is_whole else None
        if calls is None or not all(call.name in self._tools for call in calls):
            return Ended(part.end, None)
        return Ended(part.end, calls)
