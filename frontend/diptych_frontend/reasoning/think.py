"""The format `<think>reasoning</think>answer` of Qwen and DeepSeek models."""

from __future__ import annotations

from typing import Final

from diptych_frontend.reasoning.splitter import certain_length

OPEN: Final = "<think>"
CLOSE: Final = "</think>"
MAX_BLANKS: Final = 16
"""An output that begins with more blanks than this does not begin with reasoning."""


class ThinkSplitter:
    """See `Splitter`. Only the beginning of an output can be reasoning; later markers are text.

    Blanks after a marker only separate it from the text, and are left out.
    """

    def __init__(self, ended: bool | None) -> None:
        """ended: False if the prompt has opened the reasoning, True if there will be none."""
        self.ended = ended
        self._held = ""
        self._after_marker = ended is False

    def push(self, piece: str, *, last: bool = False) -> tuple[str, str]:
        self._held += piece
        if self.ended is None:
            self._look_for_begin(last)
        reasoning = self._reasoning(last) if self.ended is False else ""
        answer = ""
        if self.ended:
            answer, self._held = self._trimmed(self._held), ""
        return reasoning, answer

    def _look_for_begin(self, last: bool) -> None:
        text = self._held.lstrip()
        if len(self._held) - len(text) > MAX_BLANKS:
            self.ended = True
        elif text.startswith(OPEN):
            self._held = text[len(OPEN) :]
            self.ended, self._after_marker = False, True
        elif last or not OPEN.startswith(text):
            self.ended = True

    def _reasoning(self, last: bool) -> str:
        text, marker, rest = self._held.partition(CLOSE)
        if not marker:
            certain = len(text) if last else certain_length(text, (CLOSE,))
            text, rest = text[:certain], text[certain:]
        self._held = rest
        text = self._trimmed(text)
        if marker:
            self.ended = self._after_marker = True
        return text

    def _trimmed(self, text: str) -> str:
        if self._after_marker:
            text = text.lstrip()
            self._after_marker = not text
        return text


def ended_in_prompt(prompt: str) -> bool | None:
    """Return whether the end of a prompt says that reasoning has ended (True) or begun (False)."""
    prompt = prompt.rstrip()
    if prompt.endswith(OPEN):
        return False
    return True if prompt.endswith(CLOSE) else None
