"""What a router adds to a request, in front of engines that take no time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import uvloop
from benchmarks.figures import Record
from benchmarks.scenario import Column, Options, Reporter, Scenario, rotated
from benchmarks.servers import MODEL, NotStartedError, Running, System, free_port, running

from diptych.bench.figures import percentile

SECONDS, QUICK_SECONDS = 3.0, 1.0
CONNECTIONS = (1, 16)
VERSUS = ("requests_per_s", "latency_ms", "cpu_us")
START_TIMEOUT_S = 30.0
BODY = json.dumps({
    "model": "smollm2", "prompt": "The capital of France is Paris. The capital of Germany is",
    "max_tokens": 2, "temperature": 0,
}).encode()  # fmt: skip


@contextlib.contextmanager
def engines(module: str, ports: Sequence[int], step_ms: int | None = None) -> Iterator[None]:
    """A process of engines that listens at these ports, and makes steps, if it is to make any."""
    arguments = [*ports, *([] if step_ms is None else [step_ms])]
    process = subprocess.Popen([sys.executable, "-m", module, *map(str, arguments)])
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        for port in ports:
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise NotStartedError(f"{module} did not start")
                time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)


PINNED = (
    "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)
"""A Python program that becomes another one, which stays on one core."""


def on_one_core(system: System) -> System:
    """The same system, which has the machine's first core and no other."""
    core = min(os.sched_getaffinity(0))

    def command(port: int, folder: Path) -> list[str]:
        return [sys.executable, "-c", PINNED, str(core), *system.command(port, folder)]

    return replace(system, command=command)


def our_router(prefill: Sequence[int], decode: Sequence[int], model: str = MODEL) -> System:
    """A router of engines at these ports."""
    config = {"model": model, "served_name": "smollm2", "verify": "Off"}

    def command(port: int, folder: Path) -> list[str]:
        path = folder / "router.json"
        path.write_text(json.dumps(config))
        return [
            sys.executable, "-m", "diptych_router", "--config", str(path), "--port", str(port),
            "--prefill", ",".join(f"127.0.0.1:{each}" for each in prefill),
            "--decode", ",".join(f"127.0.0.1:{each}" for each in decode),
        ]  # fmt: skip

    return System("diptych", command)


def other_routers(peers: dict[str, str], workers: Sequence[int]) -> list[System]:
    """Plain, and between prefill and decode. A peer is the program's interpreter."""
    prefill, decode = (f"http://127.0.0.1:{port}" for port in workers)
    arguments = {
        "vllm-router": (["--worker-urls", prefill],
                        ["--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode]),
        "sglang-router": (["--worker-urls", prefill, "--disable-retries"],
                          ["--pd-disaggregation", "--prefill", prefill, str(free_port()),
                           "--decode", decode]),
    }  # fmt: skip
    modules = {"vllm-router": "vllm_router.launch_router",
               "sglang-router": "sglang_router.launch_router"}  # fmt: skip

    def system(name: str, kind: str, own: list[str]) -> System:
        def command(port: int, _: Path) -> list[str]:
            return [
                peers[name], "-m", modules[name], *own, "--host", "127.0.0.1", "--port", str(port),
                "--prometheus-port", str(free_port()), "--policy", "round_robin",
            ]  # fmt: skip

        return System(f"{name}, {kind}", command, environment={"PYTHONPATH": ""})

    return [
        system(name, kind, own)
        for name, pair in arguments.items()
        if name in peers
        for kind, own in zip(("plain", "P/D"), pair, strict=True)
    ]


def completion(url: str, body: bytes) -> bytes:
    """Return the bytes of a request."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def head_of(reader: asyncio.StreamReader) -> bytes:
    """Return the head of an answer. Raises `RuntimeError` unless its status is 200."""
    answer = await reader.readuntil(b"\r\n\r\n")
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(answer.decode())
    return answer


async def hammer(url: str, connections: int, seconds: float) -> dict[str, float]:
    """Each connection sends its next request when it has an answer."""
    address, request = urlsplit(url), completion(url, BODY)
    latencies: list[float] = []

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        while time.perf_counter() < end:
            started = time.perf_counter()
            writer.write(request)
            answer = await head_of(reader)
            _, _, length = answer.lower().partition(b"content-length:")
            await reader.readexactly(int(length.split(b"\r\n")[0]))
            latencies.append((time.perf_counter() - started) * 1e3)
        writer.close()

    started = time.perf_counter()
    end = started + seconds
    async with asyncio.timeout(seconds + START_TIMEOUT_S), asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(connection())
    return {
        "requests": len(latencies),
        "requests_per_s": len(latencies) / (time.perf_counter() - started),
        "latency_ms": percentile(latencies, 50),
        "latency_p99_ms": percentile(latencies, 99),
    }


@contextlib.contextmanager
def routers_on_one_core(
    options: Options,
    reporter: Reporter,
    step_ms: int | None = None,
    kinds: tuple[str, ...] = ("plain", "P/D"),
) -> Iterator[list[Running]]:
    """Ours, and those of the peers that start, in front of engines that compute nothing.

    step_ms: as for `engines`. kinds: of peers, what they are to be.
    """
    cores, workers = [free_port(), free_port()], [free_port(), free_port()]
    others = [x for x in other_routers(options.peers, workers) if x.name.endswith(kinds)]
    with ExitStack() as stack:
        stack.enter_context(engines("benchmarks.instant_core", cores, step_ms))
        routers = [stack.enter_context(running(on_one_core(our_router(cores[:1], cores[1:]))))]
        if others:
            for port in workers:
                stack.enter_context(engines("benchmarks.instant_http", [port], step_ms))
        for system in others:
            try:
                routers.append(stack.enter_context(running(on_one_core(system))))
            except NotStartedError as exc:
                reporter.note(f"left out: {exc}")
        yield routers


Drive = Callable[[str], Coroutine[None, None, dict[str, float]]]
"""Puts load on a router, by its URL. The figures have a number of what was asked for."""


def measured(
    routers: list[Running],
    cases: Mapping[str, Drive],
    each: tuple[str, str],
    shown: tuple[str, ...],
    options: Options,
    reporter: Reporter,
) -> list[Record]:
    """Measure each case with each router in turn. each: the figure that counts what was asked for,
    and the name of the figure with the processor time of one of them. shown: while it runs."""
    records = []
    with reporter.counting("measuring", len(cases) * options.times * len(routers)):
        for case, drive in cases.items():
            for repetition in range(options.times):
                for router in rotated(routers, repetition):
                    before = router.cpu_seconds()
                    figures = uvloop.run(drive(router.url))
                    used = router.cpu_seconds() - before
                    figures[each[1]] = used * 1e6 / figures[each[0]]
                    records.append(Record(case, router.system.name, repetition, figures))
                    reporter.done(records[-1], shown)
    return records


def run(options: Options, reporter: Reporter) -> list[Record]:
    seconds = QUICK_SECONDS if options.quick else SECONDS
    cases: dict[str, Drive] = {
        f"{number} connection{'s' * (number > 1)}": partial(
            hammer, connections=number, seconds=seconds
        )
        for number in CONNECTIONS
    }
    with routers_on_one_core(options, reporter) as routers:
        return measured(routers, cases, ("requests", "cpu_us"), VERSUS, options, reporter)


SCENARIO = Scenario(
    "router",
    "Router: what it adds to a request",
    "Completions of 2 tokens in front of engines that answer at once. Ours applies the "
    "OpenAI API, tokenises, and takes each request through prefill, a lease and decode; all "
    "routers have the same core; "
    "other projects' routers forward HTTP to servers that would do the first two. Processor "
    "time is the router's own, and the figure to read on a busy machine.",
    (
        Column("requests_per_s", "requests/s", 0),
        Column("latency_ms", "p50 ms", 2),
        Column("latency_p99_ms", "p99 ms", 2),
        Column("cpu_us", "processor µs a request", 0),
    ),
    run,
    versus=VERSUS,
)
