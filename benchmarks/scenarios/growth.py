"""Does the time of a decode step stay flat as contexts, batches and queues grow?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.figures import Record
from benchmarks.scenario import Column, Options, Panel, Reporter, Scenario
from benchmarks.scenarios.overhead import DUMMY, abort, add_requests, decode_steps_ms, prefill
from benchmarks.servers import KV_GIB, MODEL

from diptych_engine.control.core import EngineCore
from diptych_engine.serving.build_core import build_core
from diptych_protocol import EngineConfig

STEPS = 16
MAX_TOKENS = 4096
CONTEXTS = (64, 256, 512, 1024, 2048, 4000)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
WAITING = (0, 16, 64, 256, 960)
ROWS = 8
"""Requests in each step while others wait."""
SHORT, USUAL = 16, 128
"""Tokens of prompts."""
REAL = EngineConfig(model=MODEL, kv_cache_bytes=KV_GIB << 30, max_model_len=MAX_TOKENS)
SMALL = EngineConfig(model=DUMMY, num_blocks=4096, max_num_seqs=ROWS, num_threads=1)


def decode_ms(core: EngineCore, batch: int, context: int, waiting: int = 0) -> float:
    """Median of some decode steps of `batch` requests. `waiting` more must find no room."""
    name = f"{batch}-{context}-{waiting}"
    decoding = add_requests(core, name, batch, context, 4 * STEPS)
    prefill(core, decoding)
    queued = add_requests(core, f"{name}-waiting", waiting, SHORT, 8)
    times = decode_steps_ms(core, STEPS)
    abort(core, [*queued, *decoding])
    return statistics.median(times)


def real_records(core: EngineCore, repetition: int) -> Iterator[Record]:
    for context in CONTEXTS:
        figures = {"step_ms": decode_ms(core, 1, context), "tokens of context": context}
        yield Record(f"context {context}", "diptych", repetition, figures)
    for batch in BATCHES:
        step_ms = decode_ms(core, batch, USUAL)
        figures = {"step_ms": step_ms, "token_ms": step_ms / batch, "requests in a step": batch}
        yield Record(f"batch {batch}", "diptych", repetition, figures)


def small_records(core: EngineCore, repetition: int) -> Iterator[Record]:
    for waiting in WAITING:
        figures = {"step_ms": decode_ms(core, ROWS, SHORT, waiting), "waiting requests": waiting}
        yield Record(f"waiting {waiting}", "diptych", repetition, figures)


def run(options: Options, reporter: Reporter) -> list[Record]:
    records: list[Record] = []
    total = len(CONTEXTS) + len(BATCHES) + len(WAITING)
    with reporter.counting("measuring", options.times * total):
        for config, measure in ((REAL, real_records), (SMALL, small_records)):
            core = build_core(config)
            try:
                for repetition in range(options.times):
                    for record in measure(core, repetition):
                        records.append(record)
                        reporter.done(record, ("step_ms",))
            finally:
                core.close()
    return records


SCENARIO = Scenario(
    "growth",
    "Growth: a decode step as load rises",
    "`context`: one request with so many tokens before it. `batch`: so many requests with "
    f"128 tokens each. `waiting`: {ROWS} requests of the 2-layer dummy model decode while so "
    "many find no room, which is the scheduler's cost alone. In the core's own process, "
    "without HTTP.",
    (Column("step_ms", "step ms", 2), Column("token_ms", "ms a token of the batch", 2)),
    run,
    panels=(
        Panel("One request, its context grows", "tokens of context", "step_ms", "context", False),
        Panel("128 tokens each, the batch grows", "requests in a step", "step_ms", "batch", False),
        Panel(f"{ROWS} run (dummy), others wait", "waiting requests", "step_ms", "waiting", False),
    ),
)
