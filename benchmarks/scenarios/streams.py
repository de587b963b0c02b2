"""What a token of a stream costs a router, in front of engines that compute nothing."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from urllib.parse import urlsplit

from benchmarks.figures import Record
from benchmarks.scenario import Column, Options, Reporter, Scenario
from benchmarks.scenarios.router import (
    START_TIMEOUT_S,
    Drive,
    completion,
    head_of,
    measured,
    routers_on_one_core,
)

STREAMS = (1, 16, 64)
STEP_MS = 10
"""Each stream has a token in each step of so many milliseconds."""
TOKENS, QUICK_TOKENS = 500, 100
END = b"data: [DONE]"
VERSUS = ("cpu_us_token",)


async def read_streams(url: str, streams: int, tokens: int) -> dict[str, float]:
    """Read so many streams of so many tokens side by side."""
    address = urlsplit(url)
    body = json.dumps({
        "model": "smollm2", "prompt": "The capital of France is Paris. The capital of Germany is",
        "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
    }).encode()  # fmt: skip

    async def stream() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(completion(url, body))
        await head_of(reader)
        events, tail = 0, b""
        while END not in tail:
            data = await reader.read(1 << 16)
            if not data:
                raise RuntimeError("a stream ended before its end")
            whole = tail + data
            events += whole.count(b'"finish_reason"') - tail.count(b'"finish_reason"')
            tail = whole[-400:]
        writer.close()
        counts.append(events)

    counts: list[int] = []
    started = time.perf_counter()
    limit = tokens * STEP_MS / 1e3 + START_TIMEOUT_S
    async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(stream())
    return {
        "tokens": streams * tokens,
        "tokens_per_s": streams * tokens / (time.perf_counter() - started),
        "tokens_an_event": streams * tokens / sum(counts),
    }


def run(options: Options, reporter: Reporter) -> list[Record]:
    tokens = QUICK_TOKENS if options.quick else TOKENS
    cases: dict[str, Drive] = {
        f"{number} stream{'s' * (number > 1)}": partial(read_streams, streams=number, tokens=tokens)
        for number in STREAMS
    }
    with routers_on_one_core(options, reporter, STEP_MS, kinds=("P/D",)) as routers:
        return measured(routers, cases, ("tokens", "cpu_us_token"), VERSUS, options, reporter)


SCENARIO = Scenario(
    "streams",
    "Router: what a token of a stream costs",
    f"Streams of {TOKENS} tokens, one every {STEP_MS} ms, through prefill and decode engines that "
    "compute nothing. Processor time is the router's own, with its part of the requests; all "
    "routers have the same core. Whoever is late puts tokens together. Ours turns the tokens of a "
    "step's message into text and events; other projects' routers forward events that servers have "
    "made.",
    (
        Column("tokens_per_s", "tokens/s", 0),
        Column("tokens_an_event", "tokens an event", 2),
        Column("cpu_us_token", "processor µs a token", 1),
    ),
    run,
    versus=VERSUS,
)
