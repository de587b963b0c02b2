"""A real service under the arrivals that are simulated as well."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from benchmarks.load import TIMEOUT_S, WORD_IDS, stream_completion

from diptych.bench.stream import Sample
from diptych.simulator.workload import Request

MODEL_NAME = "smollm2"
PROBE_TOKENS = 16
PROBE_OUTPUT = 24
PROBES = 5


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """What a user sees of an idle service, in seconds: medians of a few short requests."""

    ttft_s: float
    first_gap_s: float
    """Between the first token, which is P's, and D's first one."""
    gap_s: float


async def probe(url: str, seed: int) -> ServiceTimes:
    """One short request after the other, none of which has been asked before."""
    requests = [Request(0.0, PROBE_TOKENS, PROBE_OUTPUT, waits=n > 0) for n in range(PROBES + 1)]
    samples, _ = await send(url, requests, seed)
    samples = samples[1:]  # the first one may meet things that are cold
    return ServiceTimes(
        statistics.median(sample.ttft_s for sample in samples),
        statistics.median(sample.gaps_s[0] for sample in samples),
        statistics.median(gap for sample in samples for gap in sample.gaps_s[1:]),
    )


async def send(url: str, requests: Sequence[Request], seed: int) -> tuple[list[Sample], float]:
    """Send requests at their arrivals, or those that wait when one before has ended. Prompts are
    random. Returns what users saw, and the seconds from the first arrival to the last end.

    Raises `RuntimeError` for any answer that is not complete.
    """
    random_ids = random.Random(seed)
    waiting = iter([request for request in requests if request.waits])
    samples: list[Sample] = []
    limits = httpx.Limits(max_connections=len(requests))
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        started = time.perf_counter()

        async def user(request: Request | None) -> None:
            while request is not None:
                early = request.arrival - (time.perf_counter() - started)
                await asyncio.sleep(max(0.0, early))
                prompt = random_ids.choices(WORD_IDS, k=request.prompt)
                samples.append(await stream_completion(client, MODEL_NAME, prompt, request.output))
                request = next(waiting, None)

        async with asyncio.TaskGroup() as users:
            for request in requests:
                if not request.waits:
                    users.create_task(user(request))
        wall_s = time.perf_counter() - started
    return samples, wall_s - requests[0].arrival
