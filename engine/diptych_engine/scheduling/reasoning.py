"""What a grammar has to know of the reasoning that may stand before the answer."""

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
    """How the model of an engine marks its reasoning, in its tokens."""

    style: ReasoningFormat
    tokenizer: Tokenizer
    opener: tuple[int, ...]
    """What an output begins with if it begins with reasoning."""
    free: NDArray[np.uint8] = field(repr=False)
    """One bit for each token, the lowest of a byte first: all but those that end an answer, which
    would be none without what its grammar demands."""

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
        """The reasoning that may come after a prompt, whose last tokens these are; None if none
        does.

        said_ended: what the request says, as `request_options.said_ended`.
        """
        ended = begins_ended(
            self.style,
            said_ended,
            lambda: self.tokenizer.decode(prompt_tail, skip_special_tokens=False),
        )
        return None if ended else Reasoning(self, begun=ended is False)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What one output may begin with, before its answer."""

    tokens: ReasoningTokens
    begun: bool
    """The prompt has begun it; without that, the output may or may not."""

    def splitter(self) -> Splitter:
        """Reads the output from its reasoning on."""
        made = self.tokens.style.splitter(False if self.begun else None)
        if not self.begun:
            made.push(self.tokens.style.opener)
        return made
