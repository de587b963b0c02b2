"""LLMEngines with a small random model, and what tests ask of them.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from typing import Any

import msgspec
from engine_kit.core import DUMMY

from diptych_engine import EngineArgs, LLMEngine
from diptych_protocol import RequestOutput, SamplingParams, SchedulerStats

ARGS = EngineArgs(DUMMY, num_gpu_blocks_override=256, num_threads=1, max_num_seqs=16)
CONFIG = ARGS.create_engine_config()


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **fields})


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """All outputs until nothing is left, by the users' ids."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            outputs.setdefault(output.request_id, []).append(output)
    assert engine.get_num_unfinished_requests() == 0
    return outputs


def stats(engine: LLMEngine) -> SchedulerStats:
    return msgspec.convert(engine.call_core("stats"), SchedulerStats)
