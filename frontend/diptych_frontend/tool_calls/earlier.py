"""Rewrites tools, earlier calls and their results into the shapes that chat templates expect."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, Final

from diptych_frontend.tool_calls.calls import json_of

Message = dict[str, Any]
Declared = list[dict[str, Any]]
"""The tools of a request, as templates get them."""

ID_LENGTH: Final = 9
_SHORT_ID: Final = re.compile(rf"[a-zA-Z0-9]{{{ID_LENGTH}}}")
_THOUGHTS: Final = ("reasoning_content", "thinking")
"""Both have the same text: templates call it one or the other."""


def short_ids(messages: list[Message], tools: Declared) -> list[Message]:
    """Replace every id of a call by one of nine letters and digits, as Mistral's templates require.
    Equal ids stay equal."""
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: Message) -> Message:
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short_id(message["tool_call_id"])
    if message.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "id": _short_id(call["id"])} for call in message["tool_calls"]
        ]
    return changed


def _short_id(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:ID_LENGTH]


def one_call_each(messages: list[Message], tools: Declared) -> list[Message]:
    """Split a message with several calls, which the templates of Llama refuse, into one message per
    call, each followed by its result."""
    made: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            made.append(message)
            continue
        end = at
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        made.extend(_parted(message, calls, messages[at:end]))
        at = end
    return made


def _parted(message: Message, calls: list[Any], results: list[Message]) -> list[Message]:
    ids = [call["id"] for call in calls]
    made: list[Message] = []
    for number, call in enumerate(calls):
        if number == 1:
            message = {"role": message["role"], "content": ""}
        made.append({**message, "tool_calls": [call]})
        made.extend(result for result in results if result.get("tool_call_id") == call["id"])
    # A result of none of the calls is for the template to judge.
    made.extend(result for result in results if result.get("tool_call_id") not in ids)
    return made


def one_thought_each(messages: list[Message], tools: Declared) -> list[Message]:
    """Do the same as `one_call_each`, and append the text of a message with a call to its
    reasoning, because the template of gpt-oss has one place for both."""
    return [_with_one_thought(message) for message in one_call_each(messages, tools)]


def _with_one_thought(message: Message) -> Message:
    thought = message.get("thinking")
    said = message.get("content")
    if not (message.get("tool_calls") and thought and isinstance(said, str) and said):
        return message
    return {**message, "content": "", **dict.fromkeys(_THOUGHTS, f"{thought}\n{said}")}


def tools_of_the_system(messages: list[Message], tools: Declared) -> list[Message]:
    """Put the functions as JSON into the message of the system, where the template of Phi-4-mini
    looks for them."""
    if not tools:
        return messages
    system = {"role": "system", "content": ""}
    if messages[0].get("role") == "system":
        system, *messages = messages
    functions = [tool["function"] for tool in tools]
    return [{**system, "tools": json_of(functions)}, *messages]


def with_calls_in_text(message: Message, write: Callable[[list[dict[str, Any]]], str]) -> Message:
    """Move the calls of a message into its text, for templates that show nothing else.

    write: the calls as the model writes them, from their names and arguments.
    """
    if not isinstance(message["content"], str):
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    without = {field: value for field, value in message.items() if field != "tool_calls"}
    return {**without, "content": message["content"] + write(calls)}
