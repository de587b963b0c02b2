"""Finds where a JSON object or list ends in a text that is still growing."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from diptych_frontend.tool_calls.calls import MAX_CALL

MAX_DEPTH: Final = 100
"""More brackets inside each other than this are no arguments."""

_OUTSIDE = re.compile(r'[\[\]{}"]')
_IN_STRING = re.compile(r'["\\]')


class JsonPart(NamedTuple):
    end: int
    """The place behind it."""
    is_whole: bool
    """Its brackets are closed; otherwise it is too deep or too long."""


class JsonEnd:
    """Counts brackets outside of strings; whether the JSON is valid, its reader finds out."""

    def __init__(self, begin: int) -> None:
        """begin: the place of its first bracket."""
        self._begin = self._at = begin
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> JsonPart | None:
        """The end; None if that is still to come. text: as for `OpenCall.end`."""
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
            if sign == '"':
                self._in_string = not self._in_string
                continue
            self._depth += 1 if sign in "[{" else -1
            if self._depth == 0:
                return JsonPart(self._at, True)
            if self._depth > MAX_DEPTH:
                return JsonPart(self._at, False)
        if len(text) - self._begin > MAX_CALL:
            return JsonPart(self._begin + MAX_CALL, False)
        self._at = max(self._at, len(text))
        return None

    def _sign(self) -> re.Pattern[str]:
        return _IN_STRING if self._in_string else _OUTSIDE
