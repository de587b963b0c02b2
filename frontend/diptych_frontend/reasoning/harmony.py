"""The harmony format of gpt-oss: messages in channels, of which `final` is the answer.

`<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer`

A message to `functions.NAME` calls a tool. Its recipient is in either half of its header:
`<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>` or
`<|start|>assistant<|channel|>commentary to=functions.NAME json<|message|>{...}<|call|>`
"""

from __future__ import annotations

import re
from typing import Final

from diptych_frontend.reasoning.splitter import certain_length

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
RETURN: Final = "<|return|>"
CALL: Final = "<|call|>"
MARKERS: Final = (START, CHANNEL, MESSAGE, END, RETURN, CALL)
CONSTRAIN: Final = "<|constrain|>"
"""Only separates the words of a header; without it, two of them may become one."""
FINAL: Final = "final"
MAX_HEADER: Final = 256
"""A longer text is no message's header."""

CALL_BEGIN: Final = "<|channel|>commentary to=functions."
"""The form of a call in the answer, for the readers of calls: this, the function's name, `MESSAGE`,
its arguments and `CALL`, whatever the model wrote around them."""
RECIPIENT: Final = " to="

_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_NAME = re.compile(r"\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([a-zA-Z0-9_.-]{1,64})")


class HarmonySplitter:
    """See `Splitter`. Messages in other channels than `final` are reasoning. Text outside of
    channels is the answer."""

    def __init__(self, ended: bool | None, *, shows_calls: bool = False) -> None:
        """ended: whether the prompt has opened the answer (True), or another channel (False).

        shows_calls: calls of tools belong to the answer (see `CALL_BEGIN`) instead of the
        reasoning.
        """
        self.ended = ended
        self._shows_calls = shows_calls
        self._may_begin_in_header = shows_calls and ended is None
        """The prompt ends in a header, and the output has not begun yet."""
        self._in_call = False
        self._role = ""
        """The first half of the header: what stood before its channel."""
        self._held = ""
        self._header: str | None = None
        """The text of the header that the output is in; None outside of headers."""
        self._names_channel = False
        """The header that the output is in says which channel its message is in."""
        self._answers = ended is not False

    def push(self, piece: str, *, last: bool = False) -> tuple[str, str]:
        self._held += piece
        reasoning: list[str] = []
        answer: list[str] = []
        if self._may_begin_in_header and not self._look_for_recipient(last):
            return "", ""
        while (found := _MARKER.search(self._held)) is not None:
            self._text(self._held[: found.start()], reasoning, answer)
            self._held = self._held[found.end() :]
            answer.append(self._marker(found.group()))
        certain = len(self._held) if last else certain_length(self._held, MARKERS)
        self._text(self._held[:certain], reasoning, answer)
        self._held = self._held[certain:]
        return "".join(reasoning), "".join(answer)

    def _look_for_recipient(self, last: bool) -> bool:
        """Whether it is known by now if the output begins with the rest of a header."""
        if RECIPIENT.startswith(self._held) and not last:
            return False
        if self._held.startswith(RECIPIENT):
            self._header = ""
        self._may_begin_in_header = False
        return True

    def _text(self, text: str, reasoning: list[str], answer: list[str]) -> None:
        if self._header is None:
            (answer if self._answers else reasoning).append(text)
            if self.ended is None and text.strip():
                self.ended = True
            return
        self._header += text
        if len(self._header) > MAX_HEADER:
            answer.append(self._header)
            self._header, self._answers, self.ended = None, True, True

    def _marker(self, marker: str) -> str:
        """Go on behind a marker; returns what it adds to the answer."""
        told = self._end_of_call()
        if marker in (START, CHANNEL):
            self._role = self._header or "" if marker == CHANNEL else ""
            self._header, self._names_channel, self.ended = "", marker == CHANNEL, False
        elif marker == MESSAGE:
            told += self._begin_of_call()
            name = _NAME.match(self._header or "")
            elsewhere = self._names_channel and name is not None and name[1] != FINAL
            answers = self._in_call or not elsewhere
            self._header, self._answers, self.ended = None, answers, answers
        else:
            self._header, self._names_channel = None, False
            self._answers, self.ended = True, False
        return told

    def _begin_of_call(self) -> str:
        header = f"{self._role} {self._header or ''}"
        function = _FUNCTION.search(header) if self._shows_calls else None
        self._in_call = function is not None
        return "" if function is None else f"{CALL_BEGIN}{function[1]}{MESSAGE}"

    def _end_of_call(self) -> str:
        told = CALL if self._in_call else ""
        self._in_call = False
        return told


def ended_in_prompt(prompt: str) -> bool | None:
    """Return whether the end of a prompt opens the answer (True) or another channel (False)."""
    header, marker, text = prompt.rpartition(MESSAGE)
    if not marker or text.strip() or CHANNEL not in header:
        return None
    name = _NAME.match(header.rpartition(CHANNEL)[2])
    return name is not None and name[1] == FINAL
