"""Finds the calls of tools in an answer that arrives in any pieces."""

from __future__ import annotations

import re
import string

from diptych_frontend.reasoning.splitter import certain_length
from diptych_frontend.tool_calls.calls import OpenCall, ParsedCall, Pieces, Tools
from diptych_frontend.tool_calls.formats import ToolCallFormat


class ToolCallParser:
    """Separates an answer's text from its calls.

    A call is reported as a whole, once it is complete. A text that only begins like a call remains
    text, unless the answer was cut within it: then it is an unfinished call, which nobody can use.
    """

    def __init__(self, style: ToolCallFormat, tools: Tools, *, parallel: bool) -> None:
        """Without `parallel`, only the first call is reported."""
        self.num_calls = 0
        self._style, self._tools, self._parallel = style, tools, parallel
        self._marker = re.compile("|".join(map(re.escape, style.markers)))
        self._bare = re.compile(rf"^[ \t]*{re.escape(style.bare)}", re.MULTILINE)
        self._between = string.whitespace + style.separators
        self._held = ""
        """Text that may become a call. If a call is open, all of it since its beginning."""
        self._open: OpenCall | None = None
        self._after_call = False
        self._begins_line = True
        """There is nothing but blanks before the held text in its line."""

    def push(self, piece: str, *, last: bool = False, cut: bool = False) -> Pieces:
        """Add text, and return the text that is certain now, and the calls that are complete, in
        their order.

        last: this is the end. cut: the model did not choose it.
        """
        self._held += piece
        told: Pieces = []
        while self._open is not None or self._begin(told):
            if not self._end(told):
                break
        if last:
            self._finish(told, cut)
            self._tell(len(self._held), told)
        elif self._open is None:
            self._tell(certain_length(self._held, self._style.markers), told)
        return told

    def _begin(self, told: Pieces) -> bool:
        """Open the first call in the held text, if there is one."""
        if self._after_call:
            self._held = self._held.lstrip(self._between)
        marker = self._marker.search(self._held)
        bracket = self._bracket() if self._style.bare else None
        if bracket is not None and (marker is None or bracket < marker.start()):
            begin, written = bracket, ""
        elif marker is not None:
            begin, written = marker.start(), marker.group()
        else:
            return False
        self._tell(begin, told)
        self._open = self._style.open(written, self._tools)
        return True

    def _bracket(self) -> int | None:
        """The first one that begins a line."""
        for found in self._bare.finditer(self._held):
            if found.start() > 0 or self._begins_line:
                return found.end() - 1
        return None

    def _end(self, told: Pieces) -> bool:
        """Close the open call, if it has ended."""
        ended = None if self._open is None else self._open.end(self._held)
        if ended is None:
            return False
        self._open = None
        if ended.calls is None:
            self._tell(ended.length, told)
            return True
        self._held = self._held[ended.length :]
        self._after_call = self._begins_line = True
        self._report(ended.calls, told)
        return True

    def _report(self, found: list[ParsedCall], told: Pieces) -> None:
        for call in found:
            if self._parallel or self.num_calls == 0:
                self.num_calls += 1
                told.append(call)

    def _finish(self, told: Pieces, cut: bool) -> None:
        """Take what is left of a call out of the held text."""
        if self._open is not None:
            found = self._open.unfinished(self._held)
            if found or (cut and found is not None):
                self._report(found, told)
                self._held = ""
        elif cut:
            certain = certain_length(self._held, self._style.markers)
            if len(self._held) - certain > 1:  # one character may be anything
                self._held = self._held[:certain]

    def _tell(self, length: int, told: Pieces) -> None:
        """So much of the held text is certain to be text. Blanks after a call only part it from
        what follows."""
        text, self._held = self._held[:length], self._held[length:]
        if self._after_call:
            text = text.lstrip(self._between)
        if not text:
            return
        self._after_call = False
        _, newline, line = text.rpartition("\n")
        self._begins_line = not line.strip() and (bool(newline) or self._begins_line)
        if told and isinstance(before := told[-1], str):
            told[-1] = before + text
        else:
            told.append(text)
