"""Finds the end of a JSON object or list, or a list of Python, in a text that is still growing."""

from __future__ import annotations

import re
from typing import ClassVar, Final, NamedTuple

from diptych_frontend.tool_calls.calls import MAX_CALL

MAX_DEPTH: Final = 100
"""Arguments with deeper nesting than this are refused."""

_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
"""What matters inside of a string, by its quotation mark."""


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
