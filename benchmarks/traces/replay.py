"""A trace on a real service: its prompts in tokens, sent when the trace says, and what came of it.

Users of a trace do not wait for each other: a request is sent at its time, however many are open.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from benchmarks.load import TIMEOUT_S, WORD_IDS, stream_completion
from benchmarks.traces.recorded import Trace

from diptych.bench.figures import percentile
from diptych.bench.stream import Sample


@dataclass(frozen=True, slots=True)
class Replay:
    """Which trace is replayed, and how."""

    trace: Path | None = None
    """A file; None: a trace of agents is made."""
    first: int | None = None
    """Only so many requests."""
    speeds: tuple[float, ...] = (1.0, 2.0, 4.0)
    """Multiples of the trace's rate."""
    block_tokens: int = 16
    """Tokens of a block, instead of 512; all lengths in proportion."""
    prefill: int = 2
    decode: int = 2
    """Engines of the service."""
    routing: tuple[str, ...] = ("prefixAware",)
    """A service for each: `spec.router.policy`, and after a slash `spec.router.disaggregate`."""
    ttft_ms: float = 2000.0
    """Promised to each request."""
    tpot_ms: float = 200.0
    """Promised to each request: a token after the first, on average."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that had no whole answer, and why."""

    reason: str


Outcome = Sample | Failure


def prompts(trace: Trace, seed: int) -> list[list[int]]:
    """The tokens of each request. A block has the same ones wherever its id occurs; another seed
    gives other ones, so that no cache remembers a replay before this one."""
    return [
        _prompt(request.prompt, request.blocks, trace.block_tokens, f"{seed}/{number}", seed)
        for number, request in enumerate(trace.requests)
    ]


def _prompt(
    length: int, blocks: Sequence[int], block_tokens: int, own: str, seed: int
) -> list[int]:
    tokens: list[int] = []
    for block in blocks:
        tokens += random.Random(f"{seed}:{block}").choices(WORD_IDS, k=block_tokens)
    missing = max(0, length - len(tokens))
    return tokens[:length] + random.Random(own).choices(WORD_IDS, k=missing)


async def replay(url: str, model: str, trace: Trace, seed: int) -> list[Outcome]:
    """What became of each request of a trace, in its order."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    ready = prompts(trace, seed)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        started = time.perf_counter()

        async def ask(arrival: float, prompt: list[int], output: int) -> Outcome:
            await asyncio.sleep(max(0.0, arrival - (time.perf_counter() - started)))
            try:
                return await stream_completion(client, model, prompt, output)
            except (httpx.HTTPError, RuntimeError, ValueError) as exc:
                return Failure(str(exc) or repr(exc))

        return await asyncio.gather(
            *(
                ask(request.arrival, prompt, request.output)
                for request, prompt in zip(trace.requests, ready, strict=True)
            )
        )


def figures(
    trace: Trace, outcomes: Sequence[Outcome], ttft_ms: float, tpot_ms: float
) -> dict[str, float]:
    """What users saw. A request is good if its first token came within `ttft_ms`, and the others
    within `tpot_ms` each, on average.

    Percentiles and the hit rate are of the requests that were answered; without any there are none,
    and no hit rate if the server does not say what it had cached.
    """
    samples = [outcome for outcome in outcomes if isinstance(outcome, Sample)]
    good = sum(s.ttft_s * 1e3 <= ttft_ms and s.tpot_s * 1e3 <= tpot_ms for s in samples)
    found = {
        "requests": len(outcomes),
        "requests_per_s": trace.requests_per_s,
        "failed": len(outcomes) - len(samples),
        "attained": good / len(outcomes),
        "goodput_per_s": good / (trace.span_s or 1.0),
        "ideal_hit_rate": trace.ideal_hit_rate(),
    }
    answered = [
        (request.prompt, outcome.cached_tokens)
        for request, outcome in zip(trace.requests, outcomes, strict=True)
        if isinstance(outcome, Sample)
    ]
    cached = [tokens for _, tokens in answered if tokens is not None]
    if answered and len(cached) == len(answered):
        found["hit_rate"] = sum(cached) / sum(prompt for prompt, _ in answered)
    ttft = [sample.ttft_s * 1e3 for sample in samples]
    gaps = [gap * 1e3 for sample in samples for gap in sample.gaps_s]
    for name, values in (("ttft", ttft), ("itl", gaps)):
        for percent in (50, 90, 99) if values else ():
            found[f"{name}_p{percent}_ms"] = percentile(values, percent)
    return found
