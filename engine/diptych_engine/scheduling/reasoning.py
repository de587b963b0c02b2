"""What a grammar needs to know about the reasoning that may precede the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diptych_frontend.reasoning.formats import ReasoningFormat, begins_ended
from diptych_frontend.reasoning.splitter import Splitter
from diptych_frontend.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class ReasoningTokens:
    """How an engine's model marks its reasoning, in tokens."""

    style: ReasoningFormat
    tokenizer: Tokenizer
    opener: tuple[int, ...]
    """The beginning of an output that begins with reasoning."""
    free: NDArray[np.uint8] = field(repr=False)
    """One bit for each token, the lowest of a byte first: all but those that end an answer, because
    an answer that ended there would lack what its grammar requires."""

    @classmethod
    def of(
        cls, style: ReasoningFormat, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]
    ) -> ReasoningTokens:
        """ends: the tokens that end an answer."""
        bits = np.ones(vocab_size, np.bool_)
        bits[list(ends)] = False
        opener = tokenizer.encode(style.opener, add_special_tokens=False)
        return cls(style, tokenizer, tuple(opener), np.packbits(bits, bitorder="little"))

    def before(self, said_ended: bool | None, prompt_tail: Sequence[int]) -> Reasoning | None:
        """Return the reasoning that may follow a prompt with these last tokens; None if there is
        none.

        said_ended: the request's option, as in `request_options.said_ended`.
        """
        ended = begins_ended(
            self.style,
            said_ended,
            lambda: self.tokenizer.decode(prompt_tail, skip_special_tokens=False),
        )
        return None if ended else Reasoning(self, begun=ended is False)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning with which one output may begin."""

    tokens: ReasoningTokens
    begun: bool
    """Whether the prompt has begun it; otherwise the output may."""

    def splitter(self) -> Splitter:
        """Return a splitter that reads the output from its reasoning on."""
        made = self.tokens.style.splitter(False if self.begun else None)
        if not self.begun:
            made.push(self.tokens.style.opener)
        return made
