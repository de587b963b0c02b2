"""Tracks outputs in their grammars, and which tokens these allow next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.execution.grammar_compiler import HopelessFormError
from diptych_engine.scheduling.number_limit import Digits, NumberLimit
from diptych_engine.scheduling.reasoning import Reasoning
from diptych_engine.scheduling.request import Request
from diptych_frontend.reasoning.splitter import Splitter
from diptych_kernels.host_arrays import to_device
from diptych_protocol import DiptychError, EngineGenerateError

BROKEN: Final = "doesn't satisfy the grammar"
"""In llguidance's error for a token that may not come here."""
STEP_S: Final = 0.02
MOST_SLOW_S: Final = 1.0
"""One output may take so many seconds of the processor from its steps, and of all streams beside
it, beyond `STEP_S` for each token. Where every text can be read in many ways, each token takes
longer than the one before."""
TOO_SLOW: Final = (
    "an answer takes too long to follow, because it can be read in too many ways; write (x)* "
    "rather than rules that contain themselves"
)


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


class GrammarError(EngineGenerateError):
    """An output breaks its grammar, which is no fault of the form."""


class GrammarState:
    """The position of one output in its grammar, computed from the output's tokens alone. So a
    request that returns after preemption, or from another engine, has the same position."""

    def __init__(
        self,
        grammar: LLMatcher,
        reasoning: Reasoning | None = None,
        digits: Digits | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """reasoning: what may precede the part of the output with the grammar.

        digits: of the vocabulary, for a grammar of JSON. clock: counts this thread's own seconds,
        so that nobody's form is refused because the machine is busy.
        """
        self._clock, self._slow_s = clock, 0.0
        self._matcher = grammar.deep_copy()
        self._numbers = None if digits is None else NumberLimit(digits)
        self._forced: list[int] = []
        """Tokens that must come next, the first of them last. llguidance tokenizes all text that
        must follow for each mask, which takes 75 ms where that is 120 kB."""
        self._num_bytes = 0
        """The size of a mask, in bytes."""
        self._num_taken = 0
        self._preface = None if reasoning is None else Preface(reasoning)

    def allowed(self, request: Request) -> NDArray[np.uint8]:
        """Return one bit for each token, the lowest of a byte first: those that may come next.

        When the grammar is complete and allows no more, that is only the end of the answer. While
        the output reasons, all tokens are allowed but the ends of an answer. Raises `GrammarError`
        if the output breaks the grammar, and `HopelessFormError` if the grammar breaks its limits.
        """
        began = self._clock()
        bits = self._follow(request)
        self._slow_s += max(0.0, self._clock() - began - STEP_S)
        if self._slow_s > MOST_SLOW_S:
            raise HopelessFormError(TOO_SLOW)
        return bits

    def _follow(self, request: Request) -> NDArray[np.uint8]:
        new = request.token_ids[request.num_prompt_tokens + self._num_taken :]
        self._num_taken += len(new)
        for token in new:
            for of_answer in (token,) if self._preface is None else self._preface.take(token):
                self._consume(of_answer)
        if self._preface is not None:
            if not self._preface.ended:
                return self._preface.allowed(self._matcher)
            self._preface = None
        bits = self._next()
        return bits if self._numbers is None else self._numbers.without_more(bits)

    def _next(self) -> NDArray[np.uint8]:
        if self._forced:
            bits = np.zeros(self._num_bytes, np.uint8)
            bits[self._forced[-1] // 8] = 1 << self._forced[-1] % 8
            return bits
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if np.count_nonzero(bits) == 1:
            # The last one is left out, because it may be one of several ends of the answer.
            self._forced = self._matcher.compute_ff_tokens()[-2::-1]
            self._num_bytes = len(bits)
        if self._matcher.is_error():
            raise self._error()
        return bits

    def _consume(self, token: int) -> None:
        if self._forced and self._forced.pop() != token:
            self._forced = []
        # After its end only more ends can come, from a request that ignores them.
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            if self._numbers is not None:
                self._numbers.take(token)
        if self._matcher.is_error():
            raise self._error()

    def _error(self) -> DiptychError:
        reason = self._matcher.get_error().partition("\n")[0]
        if BROKEN in reason:
            return GrammarError(f"structured output: {reason}")
        return HopelessFormError(reason)


def constrain(
    logits: Tensor,
    unchanged: Tensor,
    rows: Sequence[int],
    states: Sequence[GrammarState],
    requests: Sequence[Request],
) -> dict[str, DiptychError]:
    """Exclude tokens that grammars do not allow, in place.

    If other exclusions leave no token that the grammar allows, the grammar has precedence, because
    the answer would otherwise end in the middle of a word, or never.

    logits: [requests, vocabulary]; `rows` of them have grammars, with these `states`. unchanged:
    [rows, vocabulary], the logits of those rows before anything was excluded. Returns the ids of
    requests that cannot continue, with the reasons.
    """
    failed: dict[str, DiptychError] = {}
    masks = np.zeros((len(rows), logits.shape[1]), np.bool_)
    for mask, row, state in zip(masks, rows, states, strict=True):
        request = requests[row]
        try:
            bits = state.allowed(request)
        except DiptychError as exc:
            failed[request.request_id] = exc
            mask[:] = True
        else:
            mask[:] = np.unpackbits(bits, count=len(mask), bitorder="little")
    forbidden = ~to_device(masks, logits.device)
    index = torch.tensor(rows, device=logits.device)
    constrained = logits[index].masked_fill_(forbidden, -torch.inf)
    nothing_left = constrained.amax(-1, keepdim=True) == -torch.inf
    by_grammar = unchanged.masked_fill(forbidden, -torch.inf)
    logits[index] = torch.where(nothing_left, by_grammar, constrained)
    return failed
