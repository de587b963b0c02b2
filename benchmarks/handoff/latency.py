"""Seconds around a hand-off, through two engine cores in processes of their own.

The driver plays the router. The model's blocks are as large as SmolLM2's, its arithmetic is small.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

from benchmarks.handoff.shapes import KIB, Shape
from benchmarks.handoff.speed import Link

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import EngineConfig, KVTransferConfig, RequestOutput, SamplingParams

MODEL = (
    "dummy://?num_hidden_layers=30&hidden_size=64&intermediate_size=64&num_attention_heads=3"
    "&num_key_value_heads=3&head_dim=64&vocab_size=512&max_position_embeddings=8192"
)
BLOCK_TOKENS, BLOCK_BYTES = 16, 720 * KIB
BLOCK_COUNTS = (256, 64, 16, 1)
"""Largest first: memory that was never touched is not what is measured here."""
NUM_BLOCKS = 320
WARM_UPS = 3
MAX_SEQS = 4
SITUATIONS = ("idle", "full", "paused")
_names = itertools.count()


async def start(name: str) -> AsyncLLM:
    return await AsyncLLM.start(
        EngineConfig(
            MODEL, engine_id=name, num_blocks=NUM_BLOCKS, max_num_seqs=MAX_SEQS, num_threads=1,
            kv_transfer=KVTransferConfig(),
        )
    )  # fmt: skip


def prompt_of(blocks: int) -> list[int]:
    return [(at * 7 + blocks) % 500 + 2 for at in range(blocks * BLOCK_TOKENS)]


def sampling(max_tokens: int, hand_off: dict[str, Any] | None = None) -> SamplingParams:
    arguments = None if hand_off is None else {"kv_transfer_params": hand_off}
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, extra_args=arguments
    )


async def prefill(engine: AsyncLLM, prompt: list[int]) -> tuple[RequestOutput, float]:
    """The last output, with the parameters of the hand-off, and when it came."""
    params = sampling(1, {"do_remote_decode": True})
    outputs = [output async for output in engine.generate(prompt, params, f"p{next(_names)}")]
    if outputs[-1].kv_transfer_params is None:
        raise RuntimeError("prefill ended without a hand-off")
    return outputs[-1], time.perf_counter()


async def first_step(engine: AsyncLLM, prompt: list[int], params: SamplingParams) -> float:
    """When the first step of a request is known; the rest of it is awaited, too."""
    first = 0.0
    async for _ in engine.generate(prompt, params, f"d{next(_names)}"):
        first = first or time.perf_counter()
    return first


async def hand_off(p: AsyncLLM, d: AsyncLLM, blocks: int) -> tuple[float, float]:
    """From P's answer to D's first step, and D's first step when it has the KV already."""
    prompt = prompt_of(blocks)
    output, prefilled = await prefill(p, prompt)
    taken = await first_step(d, prompt, sampling(3, output.kv_transfer_params)) - prefilled
    began = time.perf_counter()
    alone = await first_step(d, prompt, sampling(2)) - began
    await d.reset_prefix_cache()
    return taken, alone


async def measure_hand_offs(p: AsyncLLM, d: AsyncLLM, repetitions: int) -> list[dict[str, Any]]:
    """On a warm connection, milliseconds by number of blocks."""
    link = Link("cma")
    rows = []
    try:
        for blocks in BLOCK_COUNTS:
            shape = Shape(BLOCK_BYTES, blocks, scattered=False)
            for _ in range(WARM_UPS):  # P's prefix cache has the prompt from the first on
                await hand_off(p, d, blocks)
                link.by_transport(shape)
            totals, alone, moving, rest = [], [], [], []
            for _ in range(repetitions):
                total, step = await hand_off(p, d, blocks)
                moved = link.by_transport(shape)
                totals.append(total * 1e3)
                alone.append(step * 1e3)
                moving.append(moved * 1e3)
                rest.append((total - moved) * 1e3)
            rows.append({
                "blocks": blocks, "total_ms": quantiles(totals), "moving_ms": quantiles(moving),
                "without_moving_ms": quantiles(rest), "first_step_alone_ms": quantiles(alone),
            })  # fmt: skip
    finally:
        link.close()
    return rows


async def measure_first_contact(p: AsyncLLM, blocks: int, engines: int) -> dict[str, float]:
    """Milliseconds of the first hand-off of a pair, minus those of its second."""
    extra = []
    for number in range(engines):
        d = await start(f"newcomer-{number}")
        try:
            await first_step(d, prompt_of(blocks), sampling(2))  # memory and torch are warm
            await d.reset_prefix_cache()
            first, _ = await hand_off(p, d, blocks)
            second, _ = await hand_off(p, d, blocks)
            extra.append((first - second) * 1e3)
        finally:
            d.shutdown()
    return quantiles(extra)


@contextlib.asynccontextmanager
async def situation(d: AsyncLLM, name: str) -> AsyncIterator[None]:
    """Inside, D is idle, full (as many requests run, and as many wait), or paused."""
    tasks: list[asyncio.Task[None]] = []
    if name == "full":
        tasks = [asyncio.create_task(keep_busy(d)) for _ in range(2 * MAX_SEQS)]
        await asyncio.sleep(1.0)
    if name == "paused":
        await d.pause_generation(mode="keep")
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if name == "paused":
            await d.resume_generation()


async def keep_busy(d: AsyncLLM) -> None:
    while True:
        await first_step(d, prompt_of(1), sampling(400))


async def measure_rejections(p: AsyncLLM, d: AsyncLLM, times: int) -> list[dict[str, Any]]:
    """Milliseconds from D's being told that it refuses to P's saying that it holds nothing."""
    rows = []
    for name in SITUATIONS:
        taken = []
        async with situation(d, name):
            for _ in range(times):
                output, _ = await prefill(p, prompt_of(16))
                hand_off = output.kv_transfer_params or {}
                began = time.perf_counter()
                await d.notify_kv_transfer_request_rejected(output.request_id, hand_off)
                while await blocks_held(p):
                    if time.perf_counter() - began > 10.0:
                        raise RuntimeError("P still holds the blocks of a rejected hand-off")
                taken.append((time.perf_counter() - began) * 1e3)
        rows.append({"decode_engine": name, "times": times, "ms": quantiles(taken)})
    return rows


async def blocks_held(engine: AsyncLLM) -> int:
    stats = (await engine.refresh_stats()).kv_transfer
    if stats is None:
        raise RuntimeError("an engine without a hinge")
    return stats.blocks_held


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)

    def at(part: float) -> float:
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))]

    return {
        "p50": statistics.median(ordered), "p90": at(0.9), "p99": at(0.99), "max": ordered[-1],
    }  # fmt: skip


async def run(repetitions: int, rejections: int, newcomers: int) -> dict[str, Any]:
    """All of it; `rejections` in each situation."""
    p, d = await start("prefill"), await start("decode")
    try:
        return {
            "hand_offs": await measure_hand_offs(p, d, repetitions),
            "first_contact_extra_ms": await measure_first_contact(p, 16, newcomers),
            "rejections": await measure_rejections(p, d, rejections),
        }
    finally:
        p.shutdown()
        d.shutdown()
