"""The calls of gpt-oss: messages to `functions.NAME`, which the reader of its reasoning leaves in
the answer, all in one form (see `reasoning.harmony`)."""

from __future__ import annotations

from typing import Final

from diptych_frontend.reasoning.harmony import CALL, CALL_BEGIN, MESSAGE
from diptych_frontend.tool_calls.calls import BetweenMarkers, ParsedCall, Tools, call_of

MARKERS: Final = (CALL_BEGIN,)


def open_call(marker: str, tools: Tools) -> BetweenMarkers:
    """Return the call that begins with the marker."""
    return BetweenMarkers(CALL_BEGIN, CALL, _read)


def _read(written: str) -> ParsedCall | None:
    name, _, arguments = written.partition(MESSAGE)
    return call_of(name, arguments)
