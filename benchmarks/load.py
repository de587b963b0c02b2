"""A closed-loop streaming load client: N users, each sending its next request when one has ended.

`python -m benchmarks.load --url http://127.0.0.1:8080 --concurrency 4 --prompt-tokens 128`
Prompts are random token ids, so their length is exact and no prefix is shared.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from dataclasses import dataclass, field

import httpx

WORD_IDS = range(1000, 48000)
TIMEOUT_S = 300.0


@dataclass(slots=True)
class Sample:
    """One request as its user saw it; times in seconds."""

    ttft_s: float
    gaps_s: list[float]
    output_tokens: int


@dataclass(slots=True)
class Cell:
    """One setting of the load, and what it gave."""

    concurrency: int
    prompt_tokens: int
    output_tokens: int
    wall_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        ttft = [s.ttft_s * 1e3 for s in self.samples]
        gaps = [g * 1e3 for s in self.samples for g in s.gaps_s]
        return {
            "concurrency": self.concurrency,
            "prompt_tokens": self.prompt_tokens,
            "requests": len(self.samples),
            "ttft_ms_p50": statistics.median(ttft),
            "itl_ms_p50": statistics.median(gaps),
            "itl_ms_p99": statistics.quantiles(gaps, n=100)[98],
            "output_tokens_per_s": sum(s.output_tokens for s in self.samples) / self.wall_s,
        }


async def one_request(client: httpx.AsyncClient, model: str, cell: Cell, seed: int) -> Sample:
    """Stream one completion. Raises for any answer that is not a complete 200."""
    rng = random.Random(seed)
    body = {
        "model": model,
        "prompt": rng.choices(WORD_IDS, k=cell.prompt_tokens),
        "max_tokens": cell.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    stamps: list[float] = []
    tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("choices"):
                stamps.append(time.perf_counter())
            elif chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    if tokens != cell.output_tokens:
        raise RuntimeError(f"{tokens} tokens instead of {cell.output_tokens}")
    gaps = [b - a for a, b in itertools.pairwise(stamps)]
    return Sample(stamps[0] - started, gaps, tokens)


async def run_cell(
    url: str, model: str, concurrency: int, prompt_tokens: int, output_tokens: int, waves: int
) -> Cell:
    """`waves` requests for each of the users."""
    cell = Cell(concurrency, prompt_tokens, output_tokens)
    seeds = iter(random.sample(range(2**31), concurrency * waves))

    async def user() -> None:
        for _ in range(waves):
            cell.samples.append(await one_request(client, model, cell, next(seeds)))

    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        started = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(concurrency)))
        cell.wall_s = time.perf_counter() - started
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--waves", type=int, default=2)
    args = parser.parse_args()
    for prompt_tokens in args.prompt_tokens:
        for concurrency in args.concurrency:
            cell = run_cell(
                args.url, args.model, concurrency, prompt_tokens, args.output_tokens, args.waves
            )
            print(json.dumps(asyncio.run(cell).summary()), flush=True)


if __name__ == "__main__":
    main()
