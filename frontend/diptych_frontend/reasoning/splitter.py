"""The common part of the splitters of all formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Splitter(Protocol):
    """Splits one output, which may arrive in any pieces.

    Text is held back only while it may be a part of a marker. Markers belong to neither half.
    """

    ended: bool | None
    """Whether the next text belongs to the answer; None while that is not known yet."""

    def push(self, piece: str, *, last: bool = False) -> tuple[str, str]:
        """Add text, and return the reasoning and the answer that are certain now.

        last: this is the end.
        """


def certain_length(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the beginning of a text are certainly not the beginning of an
    incomplete marker. All markers begin with the same character."""
    longest = max(map(len, markers)) - 1
    first = markers[0][0]
    begin = text.find(first, max(0, len(text) - longest))
    while begin >= 0:
        if any(marker.startswith(text[begin:]) for marker in markers):
            return begin
        begin = text.find(first, begin + 1)
    return len(text)
