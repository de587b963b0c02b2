"""The format `{"name": ..., "parameters": {...}}` of Llama 3, with or without `<|python_tag|>`
before it; several calls are separated by `;`."""

from __future__ import annotations

from typing import Final

from diptych_frontend.tool_calls.calls import Ended, ParsedCall, Tools, call_of_json, may_begin
from diptych_frontend.tool_calls.json_end import JsonEnd

TAG: Final = "<|python_tag|>"
MARKERS: Final = (TAG,)
SEPARATORS: Final = ";"
MAX_BLANKS: Final = 64


class LlamaCall:
    """See `OpenCall`. Without a marker, only an object that names one of the tools is a call; any
    other is part of the answer."""

    def __init__(self, marker: str, tools: Tools) -> None:
        self._marker, self._tools = len(marker), tools
        self._begin: int | None = None
        self._json = JsonEnd(0)

    def end(self, text: str) -> Ended | None:
        """See `OpenCall`."""
        if self._begin is None:
            rest = text[self._marker : self._marker + MAX_BLANKS].lstrip()
            if not rest and len(text) < self._marker + MAX_BLANKS:
                return None
            if not rest.startswith("{"):
                return Ended(self._marker, None)  # a program, not a call
            self._begin = text.index("{", self._marker)
            self._json = JsonEnd(self._begin)
        part = self._json.find(text)
        if part is None:
            return None
        call = call_of_json(text[self._begin : part.end]) if part.is_whole else None
        if call is None or call.name not in self._tools:
            return Ended(part.end, None)
        return Ended(part.end, [call])

    def unfinished(self, text: str) -> list[ParsedCall] | None:
        """See `OpenCall`."""
        names = [f'"name":"{name}"' for name in self._tools]
        beginnings = [f"{{{kind}{name}" for kind in ("", '"type":"function",') for name in names]
        return [] if self._marker or may_begin(text, beginnings) else None


def open_call(marker: str, tools: Tools) -> LlamaCall:
    """Return the call that begins with the marker; an empty marker stands for a call
    without one."""
    return LlamaCall(marker, tools)
