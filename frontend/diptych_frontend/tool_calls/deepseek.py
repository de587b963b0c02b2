"""The format of DeepSeek's models. Each call stands between markers, and all of them between two
more:

    V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a newline, the arguments in a
    fence of Markdown that says json, `<｜tool▁call▁end｜>`
    V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`
"""

from __future__ import annotations

import re
from typing import Final

from diptych_frontend.tool_calls.calls import (
    FUNCTION_NAME,
    BetweenMarkers,
    Marker,
    OpenCall,
    ParsedCall,
    Tools,
    call_of,
)

CALLS_BEGIN: Final = "<｜tool▁calls▁begin｜>"
CALLS_END: Final = "<｜tool▁calls▁end｜>"
BEGIN: Final = "<｜tool▁call▁begin｜>"
END: Final = "<｜tool▁call▁end｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"
MARKERS: Final = (CALLS_BEGIN, CALLS_END, BEGIN)

_FENCED: Final = re.compile(
    rf"\s*(?P<name>{FUNCTION_NAME})\s*```json\s*(?P<arguments>.*?)\s*```\s*", re.DOTALL
)


def open_call(marker: str, tools: Tools) -> OpenCall:
    """The call that begins with the marker, or the marker by itself."""
    return BetweenMarkers(BEGIN, END, _read) if marker == BEGIN else Marker(marker)


def _read(written: str) -> ParsedCall | None:
    first, _, second = written.partition(SEPARATOR)
    fenced = _FENCED.fullmatch(second) if first.strip() == "function" else None
    if fenced is not None:
        return call_of(fenced["name"], fenced["arguments"])
    return call_of(first.strip(), second)
