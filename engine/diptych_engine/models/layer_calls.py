"""All layers of a packed model as one table of kernel calls: what a CUDA graph is to a GPU.

Shapes: T tokens of the step, L layers, H query heads, K key-value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diptych_engine.models.interface import StepInputs
from diptych_engine.models.layer import LayerWeights
from diptych_engine.models.linear import Linear
from diptych_engine.models.packed import PackedMatrix
from diptych_frontend.model_source import ModelConfig
from diptych_kernels.call_table import WIDTH, rows_of, run_all
from diptych_kernels.native.kernel import Call
from diptych_kernels.packed_product import cpu as packed_product
from diptych_kernels.paged_attention import cpu as paged_attention
from diptych_kernels.rms_norm import cpu as rms_norm
from diptych_kernels.rope_kv_write import cpu as rope_kv_write
from diptych_kernels.silu_mul import cpu as silu_mul

CACHE = 2
"""Which number of a rotation and of attention is the address of keys and values."""
BEFORE_ATTENTION = 2
"""So many of a layer's lasting calls."""


@dataclass(slots=True, frozen=True)
class LastingCall:
    """A call that is the same in every step, but for the number of tokens and where the weight is:
    an engine that has slept may have it elsewhere."""

    call: Call
    tokens_at: int
    """Which of its numbers says how many tokens there are."""
    weight: Tensor | None = None
    weight_at: int = 0
    """Which of its numbers is the weight's address."""


class LayerCalls:
    """The calls of every layer, and the memory for what passes between them."""

    def __init__(self, layers: Sequence[LayerWeights], config: ModelConfig, tokens: int) -> None:
        """For steps of at most so many tokens."""
        self._layers, self._config, self._capacity = layers, config, tokens
        self._matrices = matrices_of(layers)
        query, key = config.num_attention_heads, config.num_key_value_heads
        self._hidden = torch.empty(tokens, config.hidden_size)
        self._normed = torch.empty(tokens, config.hidden_size)
        self._heads = torch.empty(tokens, query + 2 * key, config.head_dim)
        self._attended = torch.empty(tokens, query, config.head_dim)
        self._gate_up = torch.empty(tokens, 2 * config.intermediate_size)
        self._gated = torch.empty(tokens, config.intermediate_size)
        inputs = self._normed, self._attended.flatten(1), self._gated
        num_bytes = max(packed_product.rounded_bytes(*x.shape) for x in inputs)
        self._rounded = torch.empty(num_bytes, dtype=torch.int8)
        lasting = [call for layer in layers for call in self._lasting(layer)]
        self._table = rows_of([each.call for each in lasting])
        """[L calls, WIDTH]."""
        rows = np.arange(len(lasting))
        self._tokens_at = rows, 1 + np.array([each.tokens_at for each in lasting])
        has_weight = np.array([each.weight is not None for each in lasting])
        weight_at = 1 + np.array([each.weight_at for each in lasting])
        self._weights = [each.weight for each in lasting if each.weight is not None]
        self._weights_at = rows[has_weight], weight_at[has_weight]

    def fit(self, tokens: int) -> bool:
        """Whether a step of so many tokens can use them; not after weights were packed anew."""
        return tokens <= self._capacity and self._matrices == matrices_of(self._layers)

    def run_(
        self, hidden: Tensor, rotations: Tensor, inputs: StepInputs, kv_layers: Sequence[Tensor]
    ) -> None:
        """Turn embeddings [T, hidden] into what the last layer yields.

        rotations: [T, 1, D / 2, 2]. kv_layers: as `CausalLM.forward` takes them.
        """
        tokens = len(hidden)
        self._hidden[:tokens] = hidden
        self._table[self._tokens_at] = tokens
        self._table[self._weights_at] = [weight.data_ptr() for weight in self._weights]
        of_step = rows_of(self._of_step(tokens, rotations, inputs, kv_layers[0]))
        in_layers = np.repeat(of_step[None], len(self._layers), 0)
        in_layers[:, :, 1 + CACHE] = [[layer.data_ptr()] for layer in kv_layers]
        lasting = self._table.reshape(len(self._layers), -1, WIDTH)
        parts = lasting[:, :BEFORE_ATTENTION], in_layers, lasting[:, BEFORE_ATTENTION:]
        run_all(np.concatenate(parts, 1), torch.get_num_threads())
        hidden.copy_(self._hidden[:tokens])

    def _lasting(self, layer: LayerWeights) -> Iterator[LastingCall]:
        """A layer's calls in their order, all but rotation and attention."""
        heads, attended = self._heads.flatten(1), self._attended.flatten(1)
        yield self._norm(layer.attention_norm)
        yield self._product(self._normed, layer.qkv, heads)
        yield self._product(attended, layer.output, self._hidden, add=True)
        yield self._norm(layer.mlp_norm)
        yield self._product(self._normed, layer.gate_up, self._gate_up)
        yield LastingCall(silu_mul.call(self._gate_up, self._gated), silu_mul.ROWS)
        yield self._product(self._gated, layer.down, self._hidden, add=True)

    def _norm(self, weight: Tensor) -> LastingCall:
        call = rms_norm.call(self._hidden, weight, self._config.rms_norm_eps, self._normed)
        return LastingCall(call, rms_norm.ROWS, weight, rms_norm.WEIGHT)

    def _product(self, x: Tensor, linear: Linear, out: Tensor, *, add: bool = False) -> LastingCall:
        assert linear.packed is not None
        tiles = linear.packed.tiles
        call = packed_product.call(x, tiles, out, self._rounded, add=add)
        return LastingCall(call, packed_product.ROWS, tiles, packed_product.TILES)

    def _of_step(
        self, tokens: int, rotations: Tensor, inputs: StepInputs, kv_layer: Tensor
    ) -> list[Call]:
        """Rotation and attention: alike in all layers but for the cache's address."""
        heads, attended = self._heads[:tokens], self._attended[:tokens]
        queries = heads[:, : self._config.num_attention_heads]
        return [
            rope_kv_write.call(heads, rotations, kv_layer, inputs.slot_blocks, inputs.slot_offsets),
            *paged_attention.calls(queries, kv_layer, inputs.attention, attended),
        ]


def matrices_of(layers: Sequence[LayerWeights]) -> list[PackedMatrix | None]:
    """What the layers compute products with."""
    return [
        linear.packed
        for layer in layers
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
