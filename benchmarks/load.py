"""A closed-loop streaming load client: N users, each sending its next request when one has ended.

Prompts are random token ids, so their length is exact, and the same seed gives every system the
same prompts. `diptych bench` is the same for services whose prompts are texts.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import httpx

from diptych.bench.figures import percentile
from diptych.bench.stream import Sample, stream

WORD_IDS = range(1000, 48000)
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """What the users ask for."""

    concurrency: int
    prompt_tokens: int
    output_tokens: int = 64
    shared_tokens: int = 0
    """Number of tokens at the beginning that are the same in all prompts."""
    requests: int = 0
    """Number of requests of all users together; 0: one for each user."""

    @property
    def num_requests(self) -> int:
        return self.requests or self.concurrency

    @property
    def tokens(self) -> int:
        """Number of tokens of all prompts and answers."""
        return self.num_requests * (self.prompt_tokens + self.output_tokens)


def prompts(load: Load, seed: int) -> list[list[int]]:
    """One for each request."""
    rng = random.Random(seed)
    shared = rng.choices(WORD_IDS, k=load.shared_tokens)
    own = load.prompt_tokens - load.shared_tokens
    return [shared + rng.choices(WORD_IDS, k=own) for _ in range(load.num_requests)]


async def stream_completion(
    client: httpx.AsyncClient,
    model: str,
    prompt: list[int] | str,
    output_tokens: int,
    **fields: object,
) -> Sample:
    """Raises `RuntimeError` for any answer that is not a 200 with so many tokens.

    fields: more of the request's body.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }
    sample = await stream(client, "/v1/completions", body, TIMEOUT_S)
    if sample.output_tokens != output_tokens:
        raise RuntimeError(f"{sample.output_tokens} tokens instead of {output_tokens}")
    return sample


Ask = Callable[[httpx.AsyncClient, str, list[int], int], Coroutine[None, None, Sample]]
"""One request: from a client, a model's name, a prompt and a number of tokens."""


async def drive(
    url: str, model: str, load: Load, seed: int, ask: Ask = stream_completion
) -> dict[str, float]:
    """The figures of one load on one server."""
    waiting = iter(prompts(load, seed))
    samples: list[Sample] = []

    async def user() -> None:
        for prompt in waiting:
            samples.append(await ask(client, model, prompt, load.output_tokens))

    # A connection for each request: some servers close one after an answer, unannounced.
    limits = httpx.Limits(max_connections=load.concurrency, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as users:
            for _ in range(load.concurrency):
                users.create_task(user())
        wall_s = time.perf_counter() - started
    return summary(load, samples, wall_s)


def summary(load: Load, samples: list[Sample], wall_s: float) -> dict[str, float]:
    """Times in milliseconds."""
    gaps = [gap * 1e3 for sample in samples for gap in sample.gaps_s]
    return {
        "concurrency": load.concurrency,
        "prompt_tokens": load.prompt_tokens,
        "requests": len(samples),
        "ttft_ms": statistics.median(sample.ttft_s * 1e3 for sample in samples),
        "tpot_ms": statistics.median(sample.tpot_s * 1e3 for sample in samples),
        "itl_p99_ms": percentile(gaps, 99) if gaps else 0.0,
        "tokens_per_s": sum(sample.output_tokens for sample in samples) / wall_s,
    }
