"""Formats whose calls are between markers.

Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`

Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`

gpt-oss: messages to `functions.NAME`, which the reader of its reasoning leaves in the answer, all
in one form (see `reasoning.harmony`)

DeepSeek, whose calls are together between two more markers:

    V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a newline, the arguments in a
    fence of Markdown that says json, `<｜tool▁call▁end｜>`
    V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`
"""

from __future__ import annotations

from typing import Any, Final

from diptych_frontend.reasoning.harmony import CALL, CALL_BEGIN, MESSAGE
from diptych_frontend.tool_calls.calls import (
    BetweenMarkers,
    Marker,
    OpenCall,
    ParsedCall,
    Tools,
    call_of,
    call_of_json,
    calls_of_json,
    json_of,
)

HERMES_BEGIN: Final = "<tool_call>"
HERMES_END: Final = "</tool_call>"

PHI_BEGIN: Final = "<|tool_call|>"
PHI_END: Final = "<|/tool_call|>"

DEEPSEEK_BEGIN: Final = "<｜tool▁call▁begin｜>"
DEEPSEEK_END: Final = "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR: Final = "<｜tool▁sep｜>"
DEEPSEEK_MARKERS: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", DEEPSEEK_BEGIN)
FENCE: Final = "```"


def open_hermes(marker: str, tools: Tools) -> OpenCall:
    return BetweenMarkers(HERMES_BEGIN, HERMES_END, call_of_json, "{")


def write_hermes(calls: list[dict[str, Any]]) -> str:
    return "\n".join(f"{HERMES_BEGIN}\n{json_of(call, 'messages')}\n{HERMES_END}" for call in calls)


def open_phi(marker: str, tools: Tools) -> OpenCall:
    return BetweenMarkers(PHI_BEGIN, PHI_END, calls_of_json, "[")


def write_phi(calls: list[dict[str, Any]]) -> str:
    return f"{PHI_BEGIN}{json_of(calls, 'messages')}{PHI_END}"


def open_harmony(marker: str, tools: Tools) -> OpenCall:
    return BetweenMarkers(CALL_BEGIN, CALL, _read_harmony)


def _read_harmony(written: str) -> ParsedCall | None:
    name, _, arguments = written.partition(MESSAGE)
    return call_of(name, arguments)


def open_deepseek(marker: str, tools: Tools) -> OpenCall:
    """Return the call that begins with the marker, or the marker by itself."""
    if marker != DEEPSEEK_BEGIN:
        return Marker(marker)
    return BetweenMarkers(DEEPSEEK_BEGIN, DEEPSEEK_END, _read_deepseek)


def _read_deepseek(written: str) -> ParsedCall | None:
    name, _, arguments = written.partition(DEEPSEEK_SEPARATOR)
    if name.strip() == "function":
        name, fence, fenced = arguments.partition(f"{FENCE}json")
        arguments = fenced.strip().removesuffix(FENCE) if fence else ""
    return call_of(name.strip(), arguments)
