"""Streams that decode while long prompts come in: what disaggregation is for."""

from __future__ import annotations

import asyncio
import itertools
import random

import httpx
from benchmarks.figures import Record
from benchmarks.load import TIMEOUT_S, WORD_IDS, Load, prompts, stream_completion
from benchmarks.peers import servers as peers
from benchmarks.scenario import Column, Options, Reporter, Scenario, compare
from benchmarks.scenarios.pair import PAIR, TWO_CORES
from benchmarks.servers import Running, diptych, diptych_pair

from diptych.bench.figures import percentile
from diptych.bench.stream import Sample

LONG_PROMPT = 1024
LONG_OUTPUT = 2
"""More than one token, so that a pair hands these over too."""
LOADS = {
    "4 streams": Load(4, 64, 128),
    "8 streams": Load(8, 64, 128),
}


async def measure(server: Running, load: Load, seed: int) -> dict[str, float]:
    """Gaps of the streams, from their first tokens on, while one more user sends long prompts."""
    rng = random.Random(seed)
    long_samples: list[Sample] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:

        async def send_long_prompts() -> None:
            while True:
                prompt = rng.choices(WORD_IDS, k=LONG_PROMPT)
                sample = await stream_completion(client, server.system.model, prompt, LONG_OUTPUT)
                long_samples.append(sample)

        intruder = asyncio.create_task(send_long_prompts())
        try:
            streams = await asyncio.gather(*(
                stream_completion(client, server.system.model, prompt, load.output_tokens)
                for prompt in prompts(load, seed)
            ))  # fmt: skip
        finally:
            intruder.cancel()
            await asyncio.gather(intruder, return_exceptions=True)
    gaps = [gap * 1e3 for gap in itertools.chain.from_iterable(s.gaps_s for s in streams)]
    figures = {
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p99_ms": percentile(gaps, 99),
        "tpot_ms": percentile([stream.tpot_s * 1e3 for stream in streams], 50),
    }
    if long_samples:
        ttfts = [sample.ttft_s * 1e3 for sample in long_samples]
        figures["ttft_ms"] = percentile(ttfts, 50)
    return figures


def run(options: Options, reporter: Reporter) -> list[Record]:
    two = diptych(TWO_CORES, data_parallel_size=2, num_threads=1)
    systems = [diptych(), diptych_pair(PAIR), two, *peers.servers(options.peers)]
    return compare(systems, LOADS, options, reporter, measure)


SCENARIO = Scenario(
    "mixed",
    "Mixed: streams beside long prompts",
    f"Streams of 128 tokens decode while another user sends prompts of {LONG_PROMPT} tokens, "
    "one after the other. ITL is the streams', TTFT that of the long prompts. The same "
    "processors for all.",
    (
        Column("itl_p99_ms", "ITL p99 ms", 0),
        Column("itl_p50_ms", "ITL p50 ms"),
        Column("tpot_ms", "time a token p50 ms"),
        Column("ttft_ms", "TTFT of long prompts p50 ms", 0),
    ),
    run,
    versus=("itl_p99_ms", "ttft_ms"),
    first_is_baseline=True,
)
