"""What each kernel must move and compute, whoever writes it. Pure.

A kernel's limit is the larger of bytes over bandwidth and operations over the matrix rate. Bytes
are those that must cross the device's memory once; what a kernel moves beyond them (partial
results, rows read again) counts against it. Operations are counted for attention only: elsewhere
they hide behind the bytes by far.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a model, whole, on one device."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int
    itemsize: int
    """Bytes of a weight, an activation, and a number in the cache."""
    block_size: int

    @property
    def query(self) -> int:
        """Bytes of all query heads of a token."""
        return self.heads * self.head_dim * self.itemsize

    @property
    def kv(self) -> int:
        """Bytes of a token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def block(self) -> int:
        """Bytes of a KV block, all layers."""
        return self.layers * self.block_size * self.kv


LLAMA_3_8B = Model(4096, 14336, 32, 8, 128, 32, 128256, 2, 16)


@dataclass(frozen=True, slots=True)
class Cost:
    bytes: int
    flops: int = 0

    def seconds(self, bandwidth: float, rate: float) -> float:
        """At the limit: bytes a second and operations a second."""
        return max(self.bytes / bandwidth, self.flops / rate)


def rms_norm(model: Model, rows: int) -> Cost:
    """Read and write each row; the weight once."""
    return Cost((2 * rows + 1) * model.hidden * model.itemsize)


def silu_mul(model: Model, rows: int) -> Cost:
    """Read gate and up, write their product."""
    return Cost(3 * rows * model.intermediate * model.itemsize)


def rope_kv_write(model: Model, tokens: int) -> Cost:
    """Queries are read and written back, keys and values read and written to the cache."""
    return Cost(tokens * (2 * model.query + 2 * model.kv + 4 * model.head_dim + 16))


def decode_attention(model: Model, contexts: Iterable[int]) -> Cost:
    """Read every key and value once, for all heads that share them; read queries, write results."""
    contexts = list(contexts)
    moved = sum(contexts) * model.kv + 2 * len(contexts) * model.query
    return Cost(moved, 4 * sum(contexts) * model.heads * model.head_dim)


def prefill_attention(model: Model, new: int, prefix: int) -> Cost:
    """Attention of `new` tokens that follow `prefix` ones: two products for each query and each key
    that it sees."""
    pairs = new * prefix + new * (new + 1) // 2
    moved = (new + prefix) * model.kv + 2 * new * model.query
    return Cost(moved, 4 * pairs * model.heads * model.head_dim)


def products(model: Model) -> list[tuple[str, int, int]]:
    """The four products of a layer: name, inputs and outputs."""
    heads, all_heads = model.heads, model.heads + 2 * model.kv_heads
    return [
        ("qkv", model.hidden, all_heads * model.head_dim),
        ("o", heads * model.head_dim, model.hidden),
        ("gate and up", model.hidden, 2 * model.intermediate),
        ("down", model.intermediate, model.hidden),
    ]


def product(model: Model, rows: int, inputs: int, outputs: int) -> Cost:
    """Read both factors, write the product."""
    moved = (inputs * outputs + rows * (inputs + outputs)) * model.itemsize
    return Cost(moved, 2 * rows * inputs * outputs)


def packed_product(model: Model, rows: int, inputs: int, outputs: int, packed: int) -> Cost:
    """As `product`, with a matrix of so many bytes."""
    return Cost(packed + rows * (inputs + outputs) * model.itemsize, 2 * rows * inputs * outputs)


def layer_weights(model: Model) -> int:
    """Numbers in the four products of a layer."""
    return sum(inputs * outputs for _, inputs, outputs in products(model))


def decode_step(model: Model, contexts: Iterable[int]) -> Cost:
    """Read every weight once, and every key and value; up to the logits."""
    contexts = list(contexts)
    attention = decode_attention(model, contexts)
    weights = model.layers * layer_weights(model) + model.vocabulary * model.hidden
    return Cost(
        weights * model.itemsize + model.layers * attention.bytes,
        2 * weights * len(contexts) + model.layers * attention.flops,
    )


def mixed_step(model: Model, contexts: Iterable[int], new: int) -> Cost:
    """Decodes and a whole prompt, which share the reading of weights."""
    decodes, prompt = decode_step(model, contexts), prefill_step(model, new)
    weights = model.layers * layer_weights(model) + model.vocabulary * model.hidden
    return Cost(
        decodes.bytes + prompt.bytes - weights * model.itemsize, decodes.flops + prompt.flops
    )


def prefill_step(model: Model, new: int) -> Cost:
    """A whole prompt, and the logits of its last token."""
    attention = prefill_attention(model, new, 0)
    head = model.vocabulary * model.hidden
    weights = model.layers * layer_weights(model)
    return Cost(
        (weights + head) * model.itemsize + model.layers * attention.bytes,
        2 * (weights * new + head) + model.layers * attention.flops,
    )


def block_copy(model: Model, blocks: int) -> Cost:
    """Read and write."""
    return Cost(2 * blocks * model.block)


def sampling(model: Model, rows: int) -> Cost:
    """Read the float32 logits once."""
    return Cost(4 * rows * model.vocabulary)
