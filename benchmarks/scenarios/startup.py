"""From the start of a process to the first token that its user sees."""

from __future__ import annotations

import asyncio
import time

import httpx
from benchmarks.figures import Record
from benchmarks.load import TIMEOUT_S, Load, prompts, stream_completion
from benchmarks.peers import servers as peers
from benchmarks.scenario import Column, Options, Reporter, Scenario
from benchmarks.servers import NotStartedError, System, diptych, diptych_pair, running

CASE = "first token"
REQUEST = Load(1, 16, 2)


async def first_token_s(url: str, model: str) -> float:
    """Seconds from sending a server its first request to the first token of the answer."""
    [prompt] = prompts(REQUEST, seed=0)
    # Reading certificates, which no server here has, would take 33 ms of the time measured.
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, verify=False) as client:
        sample = await stream_completion(client, model, prompt, REQUEST.output_tokens)
    return sample.ttft_s


def measure(system: System) -> dict[str, float]:
    """Seconds until the system says that it is ready, and until a first token has come."""
    started = time.perf_counter()
    with running(system) as server:
        ready_s = time.perf_counter() - started
        token_s = asyncio.run(first_token_s(server.url, system.model))
        return {"ready_s": ready_s, "first_token_s": ready_s + token_s}


def starts(system: System, reporter: Reporter) -> bool:
    """Start a system once without measuring, because files that were never read are not in the
    kernel's cache. Returns whether it started."""
    try:
        with running(system):
            return True
    except NotStartedError as exc:
        reporter.note(f"left out: {exc}")
        return False


def run(options: Options, reporter: Reporter) -> list[Record]:
    systems = [diptych(), diptych_pair(), *peers.servers(options.peers)]
    systems = [system for system in systems if starts(system, reporter)]
    records: list[Record] = []
    with reporter.counting("measuring", options.times * len(systems)):
        for repetition in range(options.times):
            for system in systems:
                record = Record(CASE, system.name, repetition, measure(system))
                records.append(record)
                reporter.done(record, ("ready_s", "first_token_s"))
    return records


SCENARIO = Scenario(
    "startup",
    "Start-up: from the process to the first token",
    "Seconds from the start of the process to the first streamed token of a request of 16 "
    "tokens, and to readiness. Every system has been started once before, so files are in "
    "the kernel's cache.",
    (Column("first_token_s", "first token s", 2), Column("ready_s", "ready s", 2)),
    run,
    versus=("first_token_s",),
)
