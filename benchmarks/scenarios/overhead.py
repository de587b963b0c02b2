"""What the engine costs beside the model: a step of one too small to cost anything."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

from benchmarks.figures import Record
from benchmarks.scenario import Column, Options, Reporter, Scenario

from diptych.bench.figures import percentile
from diptych_engine.control.core import EngineCore
from diptych_engine.serving.build_core import build_core
from diptych_protocol import (
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    SamplingParams,
    wire,
)

BATCHES = (1, 64)
STEPS = 200
PROMPT_TOKENS = 16
"""Short, so that attention over the context stays small beside the overhead."""
DUMMY = "dummy://?num_hidden_layers=2&hidden_size=64"
CONFIG = EngineConfig(
    model=DUMMY, num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=4096, num_threads=1
)


def add_requests(
    core: EngineCore, name: str, count: int, prompt_tokens: int, output_tokens: int
) -> list[str]:
    """Greedy requests, no two with a common prefix; returns their ids."""
    ids = [f"{name}-{index}" for index in range(count)]
    params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
    for index, request_id in enumerate(ids):
        prompt = [index % 1000 + 2] * prompt_tokens
        request = EngineCoreRequest(
            request_id, prompt, None, params, None, None, 0.0, None, None, None
        )
        core.add(request, b"\0bench")
    return ids


def step(core: EngineCore) -> set[str]:
    """Do what the core's loop does between two polls of its sockets. Returns the ids of the
    requests that got tokens."""
    plan, result = core.start_step()
    core.finish_step(plan, result)
    made = core.take_outputs()
    for outputs in made.values():
        wire.encoder.encode(EngineCoreOutputs(outputs=outputs))
    return {output.request_id for outputs in made.values() for output in outputs}


def prefill(core: EngineCore, request_ids: Iterable[str]) -> None:
    """Run steps until each request has its first token."""
    missing = set(request_ids)
    while missing:
        missing -= step(core)


def abort(core: EngineCore, request_ids: Iterable[str]) -> None:
    core.abort(request_ids)
    while core.has_work:
        step(core)


def decode_steps_ms(core: EngineCore, steps: int) -> list[float]:
    """Milliseconds of each of the next steps, in which all requests decode, because they have been
    prefilled."""
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        step(core)
        times.append((time.perf_counter() - started) * 1e3)
    return times


def measure(core: EngineCore, batch: int) -> dict[str, float]:
    """Milliseconds of a decode step."""
    requests = add_requests(core, f"b{batch}", batch, PROMPT_TOKENS, STEPS + 8)
    prefill(core, requests)
    times = decode_steps_ms(core, STEPS)
    abort(core, requests)
    return {"step_ms": statistics.median(times), "step_p90_ms": percentile(times, 90)}


def run(options: Options, reporter: Reporter) -> list[Record]:
    core = build_core(CONFIG)
    try:
        records = list(_records(core, options))
    finally:
        core.close()
    for record in records:
        reporter.done(record, ("step_ms",))
    return records


def _records(core: EngineCore, options: Options) -> Iterable[Record]:
    for repetition in range(options.times):
        for batch in BATCHES:
            yield Record(f"batch {batch}", "diptych", repetition, measure(core, batch))


SCENARIO = Scenario(
    "overhead",
    "Overhead: a decode step of a 2-layer dummy model",
    "Scheduling, input preparation, a forward pass of hidden size 64 on one thread, "
    f"sampling, outputs and their encoding; median of {STEPS} steps.",
    (Column("step_ms", "step ms", 3), Column("step_p90_ms", "p90 ms", 3)),
    run,
)
