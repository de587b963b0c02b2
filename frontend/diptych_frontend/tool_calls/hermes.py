"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write it."""

from __future__ import annotations

from typing import Any, Final

from diptych_frontend.tool_calls.calls import BetweenMarkers, Tools, call_of_json, json_of

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
MARKERS: Final = (BEGIN,)


def open_call(marker: str, tools: Tools) -> BetweenMarkers:
    """Return the call that begins with the marker."""
    return BetweenMarkers(BEGIN, END, call_of_json, "{")


def written(calls: list[dict[str, Any]]) -> str:
    return "\n".join(f"{BEGIN}\n{json_of(call, 'messages')}\n{END}" for call in calls)
