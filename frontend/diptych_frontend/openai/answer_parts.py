"""Splits an answer into the model's reasoning, its text, and calls of tools."""

from __future__ import annotations

from collections.abc import Callable

from diptych_frontend.reasoning.parser import AnswerReaders
from diptych_frontend.tool_calls.calls import ParsedCall
from diptych_frontend.tool_calls.parser import ToolCallParser
from diptych_protocol import CompletionOutput


class AnswerParts:
    """Reads the answers to one request, output by output."""

    def __init__(
        self, calls: Callable[[], ToolCallParser] | None, reasoning: AnswerReaders | None
    ) -> None:
        """calls: creates a parser for the calls of tools in one answer; None if no calls are
        allowed.

        reasoning: separates the model's reasoning; None if the answers are all of the text.
        """
        self._new_parser = calls
        self._reasoning = reasoning
        self.are_whole = reasoning is None and calls is None
        """Whether the answers consist of text only."""
        self._parsers: dict[int, ToolCallParser] = {}
        """By the answer's index."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of reasoning in all answers so far; None if reasoning is not separated."""
        return None if self._reasoning is None else self._reasoning.num_tokens

    def num_calls(self, index: int) -> int:
        """Return the number of calls in the answer of this index so far."""
        parser = self._parsers.get(index)
        return 0 if parser is None else parser.num_calls

    def read(self, output: CompletionOutput) -> tuple[str, str, list[ParsedCall], str | None]:
        """Return the reasoning and the text in an output, the calls that it completes, and why it
        ended, if it did."""
        finish_reason = output.finish_reason
        reasoning, text = "", output.text
        if self._reasoning is not None:
            reasoning, text = self._reasoning.read(output)
        if self._new_parser is None:
            return reasoning, text, [], finish_reason
        parser = self._parsers.get(output.index)
        if parser is None:
            parser = self._parsers[output.index] = self._new_parser()
        is_cut = finish_reason != "stop" or isinstance(output.stop_reason, str)
        text, calls = parser.push(text, last=output.finished, cut=is_cut)
        if finish_reason == "stop" and parser.num_calls:
            finish_reason = "tool_calls"
        return reasoning, text, calls, finish_reason
