"""Traces of three kinds of use, with the ideal hit rate that is asked for. A seed decides all else.

Requests have a *context* that others may have had before: a conversation so far, instructions, or a
document. Each arrival either comes back to a context or begins one. While the hit rate so far is
below the wanted one, it comes back; so the rate of the whole trace differs from the wanted one by
no more than a few requests do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from benchmarks.simulate.traffic import LengthSpread, poisson
from benchmarks.traces.recorded import BLOCK_TOKENS, Trace, TraceRequest

LONGEST_CONTEXT: Final = 100_000
"""Tokens; a longer conversation is not gone on with."""
TOKEN_S: Final = 0.03
"""Seconds that a token of an answer takes: nobody comes back before the answer has ended."""
LONGEST_PAUSE: Final = 0.04
"""Part of a trace's time after which a context is ready again on average, at most: in a short trace
with the pauses of a long one, hardly anybody would come back."""
RECENT: Final = 0.2
"""How likely the next request is of the context that was used last, of all that are ready; of the
one before it, if it is not of that one; and so on."""
SKEW: Final = 0.8
"""The k-th agent is asked in proportion to k to the power of minus this."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What requests share, and what each of them adds."""

    about: str
    context: LengthSpread
    """Tokens of a new context."""
    own: LengthSpread
    """Tokens that a request adds to its context."""
    output: LengthSpread
    pause_s: float
    """Mean seconds from an answer to the next request that may have its context; 0: they
    overlap."""
    grows: bool = False
    """Prompt and answer become part of the context."""


def kind(name: str, hit_rate: float) -> Kind:
    """One of `KINDS`, with lengths that allow this hit rate."""
    if name == "conversations":
        return Kind(
            "each turn has all before it in its prompt",
            LengthSpread(5000, 1.2, 60_000), LengthSpread(500, 1.0, 8000),
            LengthSpread(340, 0.8, 2000),
            pause_s=20.0, grows=True,
        )  # fmt: skip
    if name == "documents":
        return Kind(
            "several questions on each document",
            LengthSpread(15_000, 0.8, 90_000), LengthSpread(120, 0.8, 1000),
            LengthSpread(150, 0.8, 1000),
            pause_s=5.0,
        )  # fmt: skip
    # If all requests came back to known instructions, a quarter of the misses would be left.
    instructions = 1500 * (3 + hit_rate) / (1 - hit_rate)
    return Kind(
        "common instructions and tools before each task",
        LengthSpread(instructions, 0.4, LONGEST_CONTEXT),
        LengthSpread(1500, 0.8, 20_000), LengthSpread(200, 0.8, 2000), pause_s=0.0,
    )  # fmt: skip


KINDS: Final = ("conversations", "agents", "documents")


@dataclass(eq=False, slots=True)
class Context:
    """What several requests have in common."""

    tokens: int
    ready_at: float = 0.0
    """When the next request that has it may come."""
    blocks: list[int] = field(default_factory=list)
    """Its whole blocks that a prompt has had."""


def generate(name: str, count: int, hit_rate: float, rate: float, seed: int) -> Trace:
    """`count` requests of a kind, `rate` of them a second on average.

    Raises `ValueError` for a hit rate that is not within 0 and 0.9.
    """
    if not 0 <= hit_rate <= 0.9:
        raise ValueError(f"a hit rate is a number from 0 to 0.9, not {hit_rate}")
    return Trace.of(_Writer(kind(name, hit_rate), hit_rate, seed).requests(count, rate, seed))


class _Writer:
    """Writes one request after the other."""

    def __init__(self, kind: Kind, hit_rate: float, seed: int) -> None:
        self._kind = kind
        self._hit_rate = hit_rate
        self._random = np.random.default_rng([seed, 2])
        self._contexts: dict[Context, None] = {}
        """Those that may be gone on with; the one that was used last is the last."""
        self._hits = self._tokens = 0
        self._next_id = 0
        self._haste = 1.0
        """What pauses are multiplied with."""

    def requests(self, count: int, rate: float, seed: int) -> list[TraceRequest]:
        random, kind = self._random, self._kind
        columns = (
            poisson(rate, count, seed), kind.context.draw(random, count),
            kind.own.draw(random, count), kind.output.draw(random, count),
        )  # fmt: skip
        usual = kind.pause_s + kind.output.mean * TOKEN_S
        self._haste = min(1.0, LONGEST_PAUSE * count / rate / usual)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [self._request(*row) for row in rows]

    def _request(self, arrival: float, context_tokens: int, own: int, output: int) -> TraceRequest:
        context = self._known(arrival) if self._below() else None
        if context is None:
            context = Context(context_tokens)
        prompt = context.tokens + own
        fresh = math.ceil(prompt / BLOCK_TOKENS) - len(context.blocks)
        blocks = [*context.blocks, *range(self._next_id, self._next_id + fresh)]
        self._next_id += fresh
        self._hits += len(context.blocks) * BLOCK_TOKENS
        self._tokens += prompt
        self._use(context, arrival, prompt, output, blocks)
        return TraceRequest(arrival, prompt, output, tuple(blocks))

    def _below(self) -> bool:
        return self._hits < self._hit_rate * self._tokens

    def _known(self, now: float) -> Context | None:
        """A context that a request may come back to now."""
        ready = [context for context in self._contexts if context.ready_at <= now]
        if not ready:
            return None
        if self._kind.pause_s:
            back = int(self._random.geometric(RECENT))
            return ready[-min(back, len(ready))]
        return self._popular(ready)

    def _popular(self, ready: Sequence[Context]) -> Context:
        weights = np.arange(1, len(ready) + 1) ** -SKEW
        return ready[int(self._random.choice(len(ready), p=weights / weights.sum()))]

    def _use(
        self, context: Context, arrival: float, prompt: int, output: int, blocks: list[int]
    ) -> None:
        """What the context is after a request."""
        kind = self._kind
        known = prompt if kind.grows else context.tokens
        context.blocks = blocks[: known // BLOCK_TOKENS]
        if kind.grows:
            context.tokens = prompt + output
        if kind.pause_s:
            self._contexts.pop(context, None)  # it becomes the last
            pause = output * TOKEN_S + float(self._random.exponential(kind.pause_s))
            context.ready_at = arrival + self._haste * pause
        if context.tokens <= LONGEST_CONTEXT:
            self._contexts.setdefault(context)
