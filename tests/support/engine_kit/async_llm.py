"""AsyncLLMs with a small random model, and what tests ask of them.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from engine_kit.core import DUMMY
from waits import PATIENCE_S, Deadline, source_of

from diptych_engine import AsyncLLM, EngineArgs
from diptych_protocol import RequestOutput, RequestOutputKind, SamplingParams

MODEL = f"{DUMMY}&max_position_embeddings=65536"
ENDLESS = 60_000
"""Tokens: more than any test waits for."""
ARGS = EngineArgs(
    MODEL, num_gpu_blocks_override=8192, num_threads=1, max_num_seqs=64, max_num_batched_tokens=256
)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **fields})


async def final(engine: AsyncLLM, request_id: str = "r", **fields: Any) -> RequestOutput:
    wanted = params(output_kind=RequestOutputKind.FINAL_ONLY, **fields)
    [output] = [o async for o in engine.generate([1, 2, 3], wanted, request_id)]
    return output


async def until(condition: Any, timeout_s: float = PATIENCE_S) -> None:
    deadline = Deadline(source_of(condition), timeout_s)
    while not condition():
        deadline.check()
        await asyncio.sleep(0.01)
