"""Engine overhead: one decode step of a 2-layer model that is too small to cost anything itself.

`python -m benchmarks.overhead` prints milliseconds a step at batch 1 and 64: scheduling, input
preparation, the model's forward pass, sampling, outputs and their encoding.
"""

from __future__ import annotations

import json
import statistics
import time

from diptych_engine.build_core import build_core
from diptych_engine.core import EngineCore
from diptych_protocol import (
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    SamplingParams,
    wire,
)

STEPS = 100
PROMPT_TOKENS = 16
"""Short, so that attention over the context stays small beside the overhead."""
CONFIG = EngineConfig(
    model="dummy://?num_hidden_layers=2&hidden_size=64",
    num_blocks=4096,
    max_num_seqs=64,
    max_num_batched_tokens=4096,
    num_threads=1,
)


def add_requests(core: EngineCore, batch: int) -> None:
    for index in range(batch):
        core.add(
            EngineCoreRequest(
                f"b{batch}-{index}", [index + 1] * PROMPT_TOKENS, None,
                SamplingParams(max_tokens=STEPS + 8, temperature=0, ignore_eos=True),
                None, None, 0.0, None, None, None,
            ),
            b"\0bench",
        )  # fmt: skip


def step(core: EngineCore) -> None:
    """What the core's loop does between two polls of its sockets."""
    plan, result = core.start_step()
    core.finish_step(plan, result)
    for outputs in core.take_outputs().values():
        wire.encoder.encode(EngineCoreOutputs(outputs=outputs))


def measure(core: EngineCore, batch: int) -> dict[str, float]:
    add_requests(core, batch)
    for _ in range(4):  # prefill, and the first decodes
        step(core)
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        step(core)
        times.append((time.perf_counter() - started) * 1e3)
    while core.has_work:
        step(core)
    return {
        "batch": batch,
        "ms_p50": statistics.median(times),
        "ms_p90": sorted(times)[-STEPS // 10],
    }


def run() -> list[dict[str, float]]:
    core = build_core(CONFIG)
    try:
        return [measure(core, batch) for batch in (1, 64)]
    finally:
        core.close()


if __name__ == "__main__":
    for row in run():
        print(json.dumps(row))
