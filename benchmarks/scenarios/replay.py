"""A trace on real engines, at several multiples of its rate."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack

from benchmarks.figures import Record
from benchmarks.load import Load, drive
from benchmarks.scenario import Column, Options, Panel, Reporter, Scenario, rotated, seed_of
from benchmarks.servers import Running, System, diptych_service, running
from benchmarks.traces.formats import read_trace
from benchmarks.traces.generate import generate
from benchmarks.traces.recorded import Trace
from benchmarks.traces.replay import Failure, Replay, figures, replay

WARM_UP = Load(4, 128, 8)
KV_GIB = 1
MADE = ("agents", 40, 0.64, 1.0, 0)
"""Kind, requests, hit rate, requests a second and seed of the trace that is made."""


def trace_of(wanted: Replay) -> Trace:
    """The requests as they are sent at speed 1.

    Raises `TraceError` or `OSError` if they are in no file.
    """
    trace = generate(*MADE) if wanted.trace is None else read_trace(wanted.trace)
    return trace.first(wanted.first).scaled(wanted.block_tokens)


def systems(wanted: Replay) -> list[System]:
    found = []
    for way in wanted.routing:
        policy, _, disaggregate = way.partition("/")
        router = {"policy": policy} | ({"disaggregate": disaggregate} if disaggregate else {})
        name = f"diptych {wanted.prefill}P{wanted.decode}D {way}"
        found.append(diptych_service(name, wanted.prefill, wanted.decode, KV_GIB, router))
    return found


def run(options: Options, reporter: Reporter) -> list[Record]:
    wanted = options.replay
    trace = trace_of(wanted)
    source = "a trace that was made" if wanted.trace is None else wanted.trace.name
    reporter.note(f"{source}, in blocks of {wanted.block_tokens} tokens: {trace.facts()}")
    speeds = wanted.speeds[:1] if options.quick else wanted.speeds
    cases = {f"x{speed:g}": trace.faster(speed) for speed in speeds}
    cases = {case: sped for case, sped in cases.items() if options.wants(case)}
    records: list[Record] = []
    with ExitStack() as stack:
        servers = [stack.enter_context(running(system)) for system in systems(wanted)]
        for server in servers:
            asyncio.run(drive(server.url, server.system.model, WARM_UP, seed=1))
        with reporter.counting("replaying", len(cases) * options.times * len(servers)):
            for case, sped in cases.items():
                for repetition in range(options.times):
                    for server in rotated(servers, repetition):
                        measured = _measured(server, sped, case, repetition, wanted, reporter)
                        records.append(measured)
                        reporter.done(measured, ("ttft_p90_ms", "goodput_per_s", "hit_rate"))
    return records


def _measured(
    server: Running, trace: Trace, case: str, repetition: int, wanted: Replay, reporter: Reporter
) -> Record:
    """One replay. Its seed is the same for all systems."""
    seed = seed_of(f"replay {case}", repetition)
    outcomes = asyncio.run(replay(server.url, server.system.model, trace, seed))
    server.rest()
    reasons = Counter(o.reason.splitlines()[0] for o in outcomes if isinstance(o, Failure))
    for reason, count in reasons.most_common(3):
        reporter.note(f"{case}, {server.system.name}: {count} failed: {reason}")
    found = figures(trace, outcomes, wanted.ttft_ms, wanted.tpot_ms)
    return Record(case, server.system.name, repetition, found)


SCENARIO = Scenario(
    "replay",
    "Replay: a trace on real engines",
    "`xN` is N times the trace's rate. Requests come when the trace says, whatever became of those "
    "before them. The hit rate is the part of prompt tokens that engines had in their prefix "
    "caches; the ideal one is that of one engine with endless memory. A request is good if its "
    "first token and its mean time a token keep their promise (`--ttft-ms`, `--tpot-ms`).",
    (
        Column("requests_per_s", "requests/s", 2),
        Column("ttft_p50_ms", "TTFT p50 ms", 0),
        Column("ttft_p90_ms", "TTFT p90 ms", 0),
        Column("ttft_p99_ms", "TTFT p99 ms", 0),
        Column("itl_p50_ms", "ITL p50 ms", 0),
        Column("itl_p99_ms", "ITL p99 ms", 0),
        Column("attained", "attained", 2),
        Column("goodput_per_s", "good requests/s", 2),
        Column("hit_rate", "hit rate", 3),
        Column("ideal_hit_rate", "ideal hit rate", 3),
        Column("failed", "failed", 0),
    ),
    run,
    panels=(
        Panel("Time to the first token", "requests_per_s", "ttft_p90_ms", logarithmic=False),
        Panel("Requests that were good", "requests_per_s", "goodput_per_s", logarithmic=False),
        Panel("Prompt tokens from caches", "requests_per_s", "hit_rate", logarithmic=False),
    ),
)
