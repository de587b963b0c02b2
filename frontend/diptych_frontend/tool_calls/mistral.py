"""The format of Mistral's models: `[TOOL_CALLS]` and a JSON list of calls, or since tokenizer
version 11 `[TOOL_CALLS]name[ARGS]{...}` for each call. Granite 3 writes such a list behind a marker
of its own."""

from __future__ import annotations

import re
from typing import Any, Final

from diptych_frontend.tool_calls.calls import (
    FUNCTION_NAME,
    Ended,
    ParsedCall,
    Tools,
    call_of,
    calls_of_json,
    json_of,
)
from diptych_frontend.tool_calls.json_end import JsonEnd

CALLS: Final = "[TOOL_CALLS]"
MARKERS: Final = (CALLS,)
OF_GRANITE: Final = ("<|tool_call|>", "<tool_call>")
MAX_HEADER: Final = 256
"""A longer text up to the first bracket is not the beginning of a call."""

_HEADER: Final = re.compile(
    rf"\s*(?:\[|(?P<name>{FUNCTION_NAME})\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*{{)"
)


class MistralCalls:
    """See `OpenCall`."""

    def __init__(self, marker: str, tools: Tools) -> None:
        self._start = len(marker)
        self._name: str | None = None
        self._begin: int | None = None
        self._json = JsonEnd(0)

    def end(self, text: str) -> Ended | None:
        if self._begin is None:
            header = _HEADER.match(text, self._start, self._start + MAX_HEADER)
            if header is None:
                is_long = len(text) >= self._start + MAX_HEADER
                return Ended(self._start, None) if is_long else None
            self._name = header["name"]
            self._begin = header.end() - 1
            self._json = JsonEnd(self._begin)
        part = self._json.find(text)
        if part is None:
            return None
        return Ended(part.end, self._calls(text[self._begin : part.end]) if part.is_whole else None)

    def unfinished(self, text: str) -> list[ParsedCall]:
        return []

    def _calls(self, written: str) -> list[ParsedCall] | None:
        if self._name is None:
            return calls_of_json(written)
        call = call_of(self._name, written)
        return None if call is None else [call]


def written_by_granite(calls: list[dict[str, Any]]) -> str:
    return f"{OF_GRANITE[0]}{json_of(calls, 'messages')}"
