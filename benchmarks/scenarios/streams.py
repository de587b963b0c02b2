"""What a token of a stream costs a router, in front of engines that compute nothing."""

from __future__ import annotations

import asyncio
import json
import time
from urllib.parse import urlsplit

import uvloop
from benchmarks.figures import Record
from benchmarks.scenario import Column, Options, Reporter, Scenario, rotated
from benchmarks.scenarios.router import START_TIMEOUT_S, routers_on_one_core
from benchmarks.servers import Running

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
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )

    async def stream() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer.decode())
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
        "tokens_per_s": streams * tokens / (time.perf_counter() - started),
        "tokens_an_event": streams * tokens / sum(counts),
    }


def run(options: Options, reporter: Reporter) -> list[Record]:
    tokens = QUICK_TOKENS if options.quick else TOKENS
    with routers_on_one_core(options, reporter, STEP_MS, kinds=("P/D",)) as routers:
        return _measured(routers, tokens, options, reporter)


def _measured(
    routers: list[Running], tokens: int, options: Options, reporter: Reporter
) -> list[Record]:
    records = []
    with reporter.counting("measuring", len(STREAMS) * options.times * len(routers)):
        for streams in STREAMS:
            case = f"{streams} stream{'s' * (streams > 1)}"
            for repetition in range(options.times):
                for router in rotated(routers, repetition):
                    before = router.cpu_seconds()
                    figures = uvloop.run(read_streams(router.url, streams, tokens))
                    used = router.cpu_seconds() - before
                    figures["cpu_us_token"] = used * 1e6 / (streams * tokens)
                    record = Record(case, router.system.name, repetition, figures)
                    records.append(record)
                    reporter.done(record, VERSUS)
    return records


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
