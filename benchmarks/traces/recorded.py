"""A trace: when requests came, how long they were, and which of them began alike. Pure.

Blocks of a prompt have ids, and blocks with the same id have the same tokens. What two prompts
share is therefore the blocks that they both begin with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from diptych.simulator.prefixes import Chain, PromptPart
from diptych.simulator.workload import Request

BLOCK_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request, without its words."""

    arrival: float
    """Seconds since the first one."""
    prompt: int
    """Tokens."""
    output: int
    """Tokens, at least one."""
    blocks: tuple[int, ...] = ()
    """The ids of the blocks that the prompt begins with. The last one may be longer than what is
    left of the prompt; what no block covers is like no other prompt."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrivals."""

    requests: Sequence[TraceRequest]
    block_tokens: int = BLOCK_TOKENS
    """Tokens of a block."""

    @classmethod
    def of(cls, requests: Iterable[TraceRequest]) -> Trace:
        """Requests in any order, whose arrivals count from any time. Raises `ValueError` for
        none."""
        ordered = sorted(requests, key=lambda request: request.arrival)
        if not ordered:
            raise ValueError("a trace has at least one request")
        begin = ordered[0].arrival
        return cls([replace(request, arrival=request.arrival - begin) for request in ordered])

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival

    @property
    def prompt_tokens(self) -> int:
        """The prompt tokens of all requests together."""
        return sum(request.prompt for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """The output tokens of all requests together."""
        return sum(request.output for request in self.requests)

    @property
    def requests_per_s(self) -> float:
        """On average, as if the first request came again right after the last one."""
        return len(self.requests) / (self.span_s or 1.0)

    def first(self, count: int | None) -> Trace:
        """The requests that came first; None: all."""
        return replace(self, requests=self.requests[:count])

    def faster(self, speed: float) -> Trace:
        """The same requests, at `speed` times the rate."""
        return replace(
            self, requests=[replace(r, arrival=r.arrival / speed) for r in self.requests]
        )

    def in_bursts(self, every_s: float) -> Trace:
        """The same requests, of which all of so many seconds come in one moment."""
        return replace(
            self,
            requests=[replace(r, arrival=r.arrival // every_s * every_s) for r in self.requests],
        )

    def scaled(self, block_tokens: int) -> Trace:
        """The same requests with blocks of another length, and all lengths in proportion."""
        factor = block_tokens / self.block_tokens

        def tokens(count: int) -> int:
            return max(1, round(count * factor))

        scaled = [
            replace(r, prompt=tokens(r.prompt), output=tokens(r.output)) for r in self.requests
        ]
        return Trace(scaled, block_tokens)

    def chains(self) -> list[Chain]:
        """What each prompt begins with. Two parts have the same key if the prompts are equal up to
        their ends: an id that occurs after other ids is another part."""
        keys: dict[tuple[int, int], int] = {}
        chains = []
        for request in self.requests:
            parts: list[PromptPart] = []
            before, end = -1, 0
            for block in request.blocks:
                before = keys.setdefault((before, block), len(keys))
                end = min(end + self.block_tokens, request.prompt)
                parts.append(PromptPart(before, end))
            chains.append(tuple(parts))
        return chains

    def ideal_hit_rate(self) -> float:
        """The part of all prompt tokens that one engine would find computed, if it had endless
        memory and all the time that it needs between two requests."""
        known: dict[int, int] = {}
        """By part: how many of its tokens some prompt has had."""
        hits = 0
        for chain in self.chains():
            begin, leading = 0, True
            for key, end in chain:
                length, seen = end - begin, known.get(key, 0)
                if leading:
                    hits += min(seen, length)
                    leading = seen >= length
                known[key] = max(seen, length)
                begin = end
        return hits / self.prompt_tokens

    def facts(self) -> str:
        """In a line."""
        count = len(self.requests)
        return (
            f"{count} requests in {self.span_s:.0f} s, {self.prompt_tokens / count:.0f} prompt "
            f"tokens and {self.output_tokens / count:.0f} output tokens on average, ideal hit rate "
            f"{self.ideal_hit_rate():.3f}"
        )


def of_trace(trace: Trace) -> list[Request]:
    """The requests of a trace, each with the blocks that its prompt begins with."""
    return [
        Request(request.arrival, request.prompt, request.output, chain)
        for request, chain in zip(trace.requests, trace.chains(), strict=True)
    ]
