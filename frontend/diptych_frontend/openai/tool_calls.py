"""Finds the calls of tools in an answer, whatever pieces it comes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from diptych_frontend.openai.tools import CALL_BEGIN, CALL_END


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments: str
    """A JSON object."""


class WrittenCall(msgspec.Struct):
    """A call as models write it; some say `parameters`."""

    name: str
    arguments: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None


class ToolCallParser:
    """Parts an answer into its text and its calls.

    A call is told as a whole, once it is complete. What begins like one and is none stays text.
    """

    def __init__(self, *, parallel: bool) -> None:
        """Without `parallel`, only the first call counts."""
        self.num_calls = 0
        self._parallel = parallel
        self._held = ""
        """Text that may become a call."""
        self._after_call = False

    def push(self, piece: str, *, last: bool = False) -> tuple[str, list[ParsedCall]]:
        """Add text; returns the text that is certain now, and the calls that are complete.

        last: there is no more to come.
        """
        self._held += piece
        text: list[str] = []
        calls: list[ParsedCall] = []
        while (begin := self._held.find(CALL_BEGIN)) >= 0:
            end = self._held.find(CALL_END, begin)
            if end < 0:
                break
            text.append(self._text(self._held[:begin]))
            written = self._held[begin + len(CALL_BEGIN) : end]
            self._held = self._held[end + len(CALL_END) :]
            call = _parse(written)
            if call is None:
                text.append(self._text(f"{CALL_BEGIN}{written}{CALL_END}"))
            elif self._parallel or self.num_calls == 0:
                self.num_calls += 1
                self._after_call = True
                calls.append(call)
        certain = len(self._held) if last else _certain(self._held)
        text.append(self._text(self._held[:certain]))
        self._held = self._held[certain:]
        return "".join(text), calls

    def _text(self, text: str) -> str:
        """Blanks after a call only part it from what follows."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text


def _certain(held: str) -> int:
    """How many characters at the beginning can be no part of a call."""
    begin = held.find(CALL_BEGIN)
    if begin >= 0:
        return begin
    for length in range(min(len(CALL_BEGIN) - 1, len(held)), 0, -1):
        if held.endswith(CALL_BEGIN[:length]):
            return len(held) - length
    return len(held)


def _parse(written: str) -> ParsedCall | None:
    try:
        call = msgspec.json.decode(written, type=WrittenCall)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    arguments = call.parameters if call.arguments is None else call.arguments
    return ParsedCall(call.name, msgspec.json.encode(arguments or {}).decode())
