"""Separates the reasoning from the answers to one request, and counts its tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from diptych_frontend.reasoning.formats import PROMPT_TAIL, ReasoningFormat, begins_ended, format_of
from diptych_frontend.reasoning.request_options import said_ended
from diptych_frontend.reasoning.splitter import Splitter
from diptych_protocol import CompletionOutput, EngineClient

TokenText = Callable[[int], str]


class ReasoningParser:
    """The reasoning format of an engine, with its tokenizer."""

    def __init__(self, style: ReasoningFormat, decode: Callable[[list[int]], str]) -> None:
        """decode: a function from token ids to their text, with special tokens."""
        self._style = style
        self._decode = decode
        self._texts: dict[int, str] = {}

    @classmethod
    def of(cls, engine: EngineClient) -> ReasoningParser | None:
        """Return the parser of an engine; None if it has no reasoning to separate."""
        style = format_of(engine.reasoning_parser, engine.renderer.chat_template)
        if style is None:
            return None
        renderer = engine.renderer
        return cls(style, lambda ids: renderer.decode(ids, skip_special_tokens=False))

    def readers(
        self, prompt: Sequence[int], kwargs: dict[str, Any], *, shown: bool, calls: bool = False
    ) -> AnswerReaders:
        """Return readers for the answers to a prompt.

        kwargs: the request's `reasoning_parser_kwargs`.

        shown: if False, the reasoning is counted and left out.

        calls: calls of tools belong to the answer.
        """
        ended = begins_ended(
            self._style, said_ended(None, kwargs), lambda: self._decode(list(prompt[-PROMPT_TAIL:]))
        )
        style = self._style
        splitter = style.call_splitter if calls and style.call_splitter else style.splitter
        return AnswerReaders(lambda: AnswerReader(splitter, ended, self._token_text), shown)

    def _token_text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._decode([token_id])
        return text


class AnswerReaders:
    """Reads the answers to one request."""

    def __init__(self, make: Callable[[], AnswerReader], shown: bool) -> None:
        self._readers = defaultdict[int, AnswerReader](make)
        self._shown = shown

    @property
    def num_tokens(self) -> int:
        """Tokens of reasoning in all answers so far, including the markers."""
        return sum(reader.num_tokens for reader in self._readers.values())

    def read(self, output: CompletionOutput) -> tuple[str, str]:
        """Return the reasoning and the answer that an output adds."""
        reasoning, answer = self._readers[output.index].read(output)
        return (reasoning if self._shown else ""), answer


class AnswerReader:
    """Splits one answer, output by output."""

    def __init__(
        self, splitter: Callable[[bool | None], Splitter], ended: bool | None, token_text: TokenText
    ) -> None:
        self._text = splitter(ended)
        self._tokens = splitter(ended)
        """Reads the tokens one by one: a text says nothing of how many tokens are in it."""
        self._token_text = token_text
        self._undecided = 0
        self.num_tokens = 0
        """Tokens of reasoning so far, with its markers."""

    def read(self, output: CompletionOutput) -> tuple[str, str]:
        """Return the reasoning and the answer that the output adds."""
        for token_id in output.token_ids:
            self._count(self._token_text(token_id))
        return self._text.push(output.text, last=output.finished)

    def _count(self, token: str) -> None:
        before = self._tokens.ended
        self._tokens.push(token)
        if before is False:
            self.num_tokens += 1
        elif before is None:
            self._undecided += 1
            if self._tokens.ended is False:
                self.num_tokens += self._undecided
