"""The harmony format of gpt-oss: messages in channels, of which `final` is the answer.

`<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer`
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
FINAL: Final = "final"
MAX_HEADER: Final = 256
"""What is longer than this is no message's header, but text."""

_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_NAME = re.compile(r"\s*(\w+)")


class HarmonySplitter:
    """See `Splitter`. Messages in other channels than `final` are reasoning; text that stands in no
    channel is the answer."""

    def __init__(self, ended: bool | None) -> None:
        """ended: whether the prompt has opened the answer (True), or another channel (False)."""
        self.ended = ended
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
        while (found := _MARKER.search(self._held)) is not None:
            self._text(self._held[: found.start()], reasoning, answer)
            self._held = self._held[found.end() :]
            self._marker(found.group())
        certain = len(self._held) if last else certain_length(self._held, MARKERS)
        self._text(self._held[:certain], reasoning, answer)
        self._held = self._held[certain:]
        return "".join(reasoning), "".join(answer)

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

    def _marker(self, marker: str) -> None:
        if marker in (START, CHANNEL):
            self._header, self._names_channel, self.ended = "", marker == CHANNEL, False
        elif marker == MESSAGE:
            name = _NAME.match(self._header or "")
            elsewhere = self._names_channel and name is not None and name[1] != FINAL
            self._header, self._answers, self.ended = None, not elsewhere, not elsewhere
        else:
            self._header, self._names_channel = None, False
            self._answers, self.ended = True, False


def ended_in_prompt(prompt: str) -> bool | None:
    """Whether the end of a prompt opens the answer (True) or another channel (False)."""
    header, marker, text = prompt.rpartition(MESSAGE)
    if not marker or text.strip() or CHANNEL not in header:
        return None
    name = _NAME.match(header.rpartition(CHANNEL)[2])
    return name is not None and name[1] == FINAL
