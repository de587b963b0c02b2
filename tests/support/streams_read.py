"""What a client makes of the events of a stream, by the path of its API."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Read:
    """What a client has."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[int, Any]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    ids: set[tuple[str, int]] = field(default_factory=set)
    usage: list[Any] = field(default_factory=list)


def as_read(events: Iterable[str]) -> Read:
    read = Read()
    for event in events:
        data = event.rpartition("data: ")[2]
        if data == "[DONE]":
            read.ends.append(data)
            continue
        chunk = json.loads(data)
        read.ids.add((chunk["id"], chunk["created"]))
        read.usage = chunk.get("usage") or read.usage
        if not chunk["choices"]:
            read.ends.append("usage")
        for choice in chunk["choices"]:
            delta = choice.get("delta", {"content": choice.get("text")})  # that of a completion
            read.content += delta["content"]
            read.reasoning += delta.get("reasoning_content", "")
            read.calls += [
                (call["index"], call["function"]) for call in delta.get("tool_calls", ())
            ]
            read.ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return read


def in_parts(events: Iterable[str]) -> list[Any]:
    """The events of another API, in which texts that follow each other are joined: they may come in
    any pieces. They count themselves, if they do. Who has not got a call of messages yet may get it
    with another id."""
    parts: list[Any] = []
    for number, event in enumerate(events):
        part = json.loads(re.sub("toolu_[0-9a-f]+", "", event.rpartition("data: ")[2]))
        assert f"event: {part['type']}\n" in event
        assert part.pop("sequence_number", number) == number
        text = part.pop("delta") if part["type"].endswith("delta") else ""
        if isinstance(text, dict) and "type" in text:  # of messages
            part["kind"], text = text.values()
        if isinstance(text, dict):
            part["delta"], text = text, ""
        if parts and parts[-1][0] == part and text:
            parts[-1][1] += text
        else:
            parts.append([part, text])
    return parts


READ: dict[str, Callable[[Iterable[str]], Any]] = {
    "/v1/chat/completions": as_read,
    "/v1/completions": as_read,
    "/v1/responses": in_parts,
    "/v1/messages": in_parts,
}
