"""The part of an output before the one with a grammar: the model's reasoning, if there is any."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from diptych_engine.scheduling.reasoning import Reasoning
from diptych_frontend.reasoning.splitter import Splitter


class Preface:
    """Reads an output token by token, until its answer begins.

    The first token decides: it belongs either to the grammar or to the marker that opens reasoning.
    If the marker has more tokens, they decide too.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self.ended = False
        """The answer has begun."""
        self._reasoning = reasoning
        self._splitter: Splitter | None = reasoning.splitter() if reasoning.begun else None
        """Reads the reasoning; None before it has begun."""
        self._opening: list[int] = []
        """The tokens so far, if they may become the marker."""

    def take(self, token: int) -> list[int]:
        """Read a token, and return the tokens that belong to the answer."""
        if self.ended:
            return [token]
        if self._splitter is not None:
            return self._read(self._splitter, token)
        opener = self._reasoning.tokens.opener
        self._opening.append(token)
        if token != opener[len(self._opening) - 1]:
            self.ended = True
            return self._opening
        if len(self._opening) == len(opener):
            self._splitter = self._reasoning.splitter()
        return []

    def _read(self, splitter: Splitter, token: int) -> list[int]:
        tokenizer = self._reasoning.tokens.tokenizer
        _, answer = splitter.push(tokenizer.token_text(token))
        self.ended = splitter.ended is True
        if not self.ended:
            return []
        # A token may end a marker and say more, in a model whose markers are ordinary text.
        answer += splitter.push("", last=True)[1]
        return tokenizer.encode(answer, add_special_tokens=False) if answer else []

    def allowed(self, grammar: LLMatcher) -> NDArray[np.uint8]:
        """Return one bit for each token, as `GrammarState.allowed`, before the answer has begun.

        grammar: in its initial state.
        """
        tokens = self._reasoning.tokens
        if self._splitter is not None:
            return tokens.free
        grammar, bits = grammar.deep_copy(), np.zeros_like(tokens.free)
        if grammar.try_consume_tokens(self._opening) == len(self._opening):
            bits = np.frombuffer(grammar.compute_bitmask(), np.uint8).copy()
        marker = tokens.opener[len(self._opening)]
        bits[marker // 8] |= 1 << marker % 8
        return bits
