"""Step costs that nobody has measured: an 8B model on one H200 a pod, from published rates.

For studies on paper only. A step takes the longer of its arithmetic and of reading the weights;
attention over prompts is arithmetic, decode rows read their KV, and both are added.
"""

from __future__ import annotations

from benchmarks.kernels.costs import LLAMA_3_8B as MODEL
from benchmarks.kernels.costs import layer_weights

from diptych.simulator.costs import StepCost
from diptych.simulator.engine import EngineLimits
from diptych.simulator.plan import Overheads

NAME = "8B (Llama 3 shape, bf16) on H200 (4.8 TB/s, 989 TFLOP/s bf16, 400 Gb/s)"
BYTES_PER_S, FLOP_PER_S, LINK_BYTES_PER_S = 4.8e12 * 0.85, 989e12 * 0.60, 50e9 * 0.80
"""Published peaks of memory, products and one pod's network, times the part of them that good
kernels reach."""
MEMORY_BYTES = 141e9
LAYERS, HEAD = MODEL.layers * layer_weights(MODEL), MODEL.hidden * MODEL.vocabulary
"""Numbers in all layers, and in the output matrix."""
KV_TOKEN_BYTES = MODEL.layers * MODEL.kv
STEP_S = 0.0008
"""Seconds that a step takes besides its kernels: to plan and to launch it."""
KNOTS = (1, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)


def step_cost() -> StepCost:
    def linear(tokens: int) -> float:
        read = LAYERS * MODEL.itemsize / BYTES_PER_S
        head = HEAD * MODEL.itemsize / BYTES_PER_S
        return STEP_S + head + max(read, 2 * LAYERS * tokens / FLOP_PER_S)

    return StepCost(
        knots=tuple((tokens, linear(tokens)) for tokens in KNOTS),
        sampled_row_s=2 * HEAD / FLOP_PER_S,
        pair_s=4 * MODEL.layers * MODEL.heads * MODEL.head_dim / FLOP_PER_S,
        kv_token_s=KV_TOKEN_BYTES / BYTES_PER_S,
    )


def limits(max_num_batched_tokens: int) -> EngineLimits:
    """What fits beside the weights, with a tenth of the memory left for all else."""
    weights = (LAYERS + 2 * HEAD) * MODEL.itemsize
    blocks = int((0.9 * MEMORY_BYTES - weights) / (16 * KV_TOKEN_BYTES))
    return EngineLimits(blocks, 16, max_num_seqs=256, max_num_batched_tokens=max_num_batched_tokens)


def overheads() -> Overheads:
    """The fixed parts are what the project measures on a CPU (benchmarks/results/handoff.md)."""
    return Overheads(0.005, 0.003, KV_TOKEN_BYTES / LINK_BYTES_PER_S)
