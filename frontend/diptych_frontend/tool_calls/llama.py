"""The format `{"name": ..., "parameters": {...}}` of Llama 3, with or without `<|python_tag|>`
before it; several calls are separated by `;`."""

from __future__ import annotations

from typing import Final

from diptych_frontend.tool_calls.calls import ParsedCall, call_of_json, may_begin
from diptych_frontend.tool_calls.json_end import BracketedCalls, JsonEnd

TAG: Final = "<|python_tag|>"
MARKERS: Final = (TAG,)
SEPARATORS: Final = ";"


class LlamaCall(BracketedCalls):
    """See `OpenCall`. An empty marker stands for a call without one."""

    BRACKET = "{"
    END = JsonEnd

    def _read(self, written: str) -> list[ParsedCall] | None:
        call = call_of_json(written)
        return None if call is None else [call]

    def unfinished(self, text: str) -> list[ParsedCall] | None:
        names = [f'"name":"{name}"' for name in self._tools]
        beginnings = [f"{{{kind}{name}" for kind in ("", '"type":"function",') for name in names]
        return [] if self._marker or may_begin(text, beginnings) else None
