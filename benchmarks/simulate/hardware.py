"""Step costs that nobody has measured: from a device's published rates and a model's shape.

For studies on paper only. A step takes the longer of its arithmetic and of reading the weights;
attention over prompts is arithmetic, decode rows read their KV, and both are added.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.simulate.costs import StepCost
from benchmarks.simulate.engine import Limits
from benchmarks.simulate.plan import Overheads


@dataclass(frozen=True, slots=True)
class Device:
    """Published peaks, and which part of them good kernels reach."""

    name: str
    bytes_per_s: float
    flop_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    """Bandwidth, in bytes per second, of one pod's network."""
    memory_part: float = 0.85
    flop_part: float = 0.60
    link_part: float = 0.80


@dataclass(frozen=True, slots=True)
class Model:
    """A dense transformer with grouped-query attention, in bytes of `width` a number."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    width: int = 2

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of all layers, without the embeddings and the output matrix."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def kv_token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.width


H200 = Device("H200 (4.8 TB/s, 989 TFLOP/s bf16, 400 Gb/s)", 4.8e12, 989e12, 141e9, 50e9)
LLAMA_8B = Model("8B (Llama 3 shape, bf16)", 32, 4096, 14336, 32, 8, 128, 128256)
STEP_S = 0.0008
"""Seconds that a step takes besides its kernels: to plan and to launch it."""
KNOTS = (1, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)


def step_cost(device: Device, model: Model) -> StepCost:
    memory, arithmetic = (
        device.bytes_per_s * device.memory_part,
        device.flop_per_s * device.flop_part,
    )

    def linear(tokens: int) -> float:
        read = model.layer_parameters * model.width / memory
        head = model.head_parameters * model.width / memory
        return STEP_S + head + max(read, 2 * model.layer_parameters * tokens / arithmetic)

    return StepCost(
        knots=tuple((tokens, linear(tokens)) for tokens in KNOTS),
        sampled_row_s=2 * model.head_parameters / arithmetic,
        pair_s=4 * model.layers * model.heads * model.head_dim / arithmetic,
        kv_token_s=model.kv_token_bytes / memory,
    )


def limits(device: Device, model: Model, max_num_batched_tokens: int) -> Limits:
    """What fits beside the weights, with a tenth of the memory left for all else."""
    weights = (model.layer_parameters + 2 * model.head_parameters) * model.width
    blocks = int((0.9 * device.memory_bytes - weights) / (16 * model.kv_token_bytes))
    return Limits(blocks, 16, max_num_seqs=256, max_num_batched_tokens=max_num_batched_tokens)


def overheads(device: Device, model: Model) -> Overheads:
    """The fixed parts are what the project measures on a CPU (benchmarks/results/handoff.md)."""
    moved = device.link_bytes_per_s * device.link_part
    return Overheads(0.005, 0.003, model.kv_token_bytes / moved)
