"""`<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`, as Phi-4-mini writes it."""

from __future__ import annotations

from typing import Any, Final

from diptych_frontend.tool_calls.calls import BetweenMarkers, Tools, calls_of_json, json_of

BEGIN: Final = "<|tool_call|>"
END: Final = "<|/tool_call|>"
MARKERS: Final = (BEGIN,)


def open_call(marker: str, tools: Tools) -> BetweenMarkers:
    """Return the calls that begin with the marker."""
    return BetweenMarkers(BEGIN, END, calls_of_json, "[")


def written(calls: list[dict[str, Any]]) -> str:
    return f"{BEGIN}{json_of(calls, 'messages')}{END}"
