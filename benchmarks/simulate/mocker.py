"""The step costs of the engines that NVIDIA Dynamo's router is simulated with, as a calibration.

Its `mocker` has one polynomial for a step that computes prompts and one for a step that decodes
(ai-dynamo/dynamo, `lib/mocker/src/common/perf_model.rs`). With the same costs, the routers of both
projects can be compared on the same traces.
"""

from __future__ import annotations

from typing import Final

from benchmarks.simulate.calibration import Calibration
from benchmarks.simulate.costs import StepCost
from benchmarks.simulate.engine import Limits
from benchmarks.simulate.plan import Overheads

LIMITS: Final = Limits(16384, 64, max_num_seqs=256, max_num_batched_tokens=8192)
KNOTS: Final = (1, 256, 1024, 2048, 4096, 6144, 8192)
KV_TOKEN_S: Final = 131072 / 64e9
"""KV of an 8B model over 64 GB/s."""


def prompt_step_s(tokens: int) -> float:
    """Seconds of a step that computes so many tokens of prompts."""
    return (4.209989e-07 * tokens**2 + 1.518344e-02 * tokens + 16.50142) * 1e-3


def costs() -> Calibration:
    """Its decode steps take 5.74 ms, and 54.01 ms more for each part of its KV memory in use. The
    square of that part is left out: it is small here."""
    capacity = LIMITS.num_blocks * LIMITS.block_size
    return Calibration(
        machine="the engine of Dynamo's simulator (mocker's polynomials)",
        prefill=StepCost(tuple((knot, prompt_step_s(knot)) for knot in KNOTS), 0.0, 0.0, 0.0),
        decode=StepCost(((1, 5.74e-3),), 0.0, 0.0, 54.01e-3 / capacity),
        slowdown={"prefill": 1.0, "decode": 1.0},
        overheads=Overheads(request_s=0.0, hand_off_s=1e-3, kv_token_s=KV_TOKEN_S),
        limits=LIMITS,
        one_machine=False,
        errors={},
    )
