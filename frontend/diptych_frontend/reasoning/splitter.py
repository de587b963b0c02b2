"""What the splitters of all formats share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Splitter(Protocol):
    """Splits one output, whatever pieces its text comes in.

    Text is held back only while it may be a part of a marker. Markers are no part of either half.
    """

    ended: bool | None
    """Whether what comes next belongs to the answer; None while that is not known yet."""

    def push(self, piece: str, *, last: bool = False) -> tuple[str, str]:
        """Add text; returns the reasoning and the answer that are certain now.

        last: there is no more to come.
        """


def certain_length(text: str, markers: Sequence[str]) -> int:
    """How many characters at the beginning of a text cannot be the first part of a marker that the
    text does not show as a whole. All markers begin with the same character."""
    longest = max(map(len, markers)) - 1
    first = markers[0][0]
    begin = text.find(first, max(0, len(text) - longest))
    while begin >= 0:
        if any(marker.startswith(text[begin:]) for marker in markers):
            return begin
        begin = text.find(first, begin + 1)
    return len(text)
