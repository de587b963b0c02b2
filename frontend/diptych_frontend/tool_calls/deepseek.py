"""The format of DeepSeek's models. Each call is between markers, and all of them are between two
more:

    V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a newline, the arguments in a
    fence of Markdown that says json, `<｜tool▁call▁end｜>`
    V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`
"""

from __future__ import annotations

from typing import Final

from diptych_frontend.tool_calls.calls import (
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

FENCE: Final = "```"


def open_call(marker: str, tools: Tools) -> OpenCall:
    """Return the call that begins with the marker, or the marker by itself."""
    return BetweenMarkers(BEGIN, END, _read) if marker == BEGIN else Marker(marker)


def _read(written: str) -> ParsedCall | None:
    name, _, arguments = written.partition(SEPARATOR)
    if name.strip() == "function":
        name, fence, fenced = arguments.partition(f"{FENCE}json")
        arguments = fenced.strip().removesuffix(FENCE) if fence else ""
    return call_of(name.strip(), arguments)
