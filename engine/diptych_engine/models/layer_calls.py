"""All layers of a packed model as one table of kernel calls, as a CUDA graph does for a GPU.

Shapes: T tokens of the step, L layers, H query heads, K key-value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.models.interface import StepInputs
from diptych_engine.models.layer import AttentionWeights, LayerWeights
from diptych_engine.models.linear import Linear
from diptych_engine.models.packed import PackedMatrix
from diptych_frontend.model_files.model_source import ModelConfig
from diptych_kernels import call_table
from diptych_kernels.call_table import WIDTH, rows_of, run_all
from diptych_kernels.cpu_level import remembered
from diptych_kernels.native.kernel import Call
from diptych_kernels.packed_product import cpu as packed_product
from diptych_kernels.packed_product import is_available as has_packed_product
from diptych_kernels.packed_product.cpu import integer_rows
from diptych_kernels.paged_attention import AttentionMetadata
from diptych_kernels.paged_attention import cpu as paged_attention
from diptych_kernels.rms_norm import cpu as rms_norm
from diptych_kernels.rms_norm.cpu import CASE as NORM
from diptych_kernels.rope_kv_write import cpu as rope_kv_write
from diptych_kernels.rope_kv_write.cpu import CASE as ROTATION
from diptych_kernels.silu_mul import cpu as silu_mul
from diptych_kernels.silu_mul.cpu import CASE as GATE
from diptych_kernels.trust import is_trusted

CACHE = rope_kv_write.CACHE
"""The position of the address of keys and values, in rotations and in attention alike."""


KindInputs = tuple[Tensor, AttentionMetadata, Tensor]
"""What layers of one kind read in a step: the rotations [T, 1, D / 2, 2], what is attended to, and
the KV block [T] of each token's keys and values."""


@dataclass(slots=True, frozen=True)
class LastingCall:
    """A call that is the same in every step, except for the number of tokens and the address of the
    weight, which may change when an engine sleeps."""

    call: Call
    tokens_at: int | None = None
    """The position of the argument with the number of tokens; None: it has none."""
    rows_at: int | None = None
    """The position of the argument with the number of rows that are summed up in integers."""
    weight: Tensor | None = None
    weight_at: int = 0
    """The position of the argument with the weight's address."""


class LastingTable:
    """The lasting calls of all layers."""

    def __init__(self, layers: Sequence[Sequence[LastingCall]]) -> None:
        calls = [call for layer in layers for call in layer]
        self._num_layers = len(layers)
        self._rows = rows_of([each.call for each in calls])
        """[L calls, WIDTH]."""
        self._tokens = _places(each.tokens_at for each in calls)
        self._in_integers = _places(each.rows_at for each in calls)
        self._weights = [each.weight for each in calls if each.weight is not None]
        self._addresses = _places(None if each.weight is None else each.weight_at for each in calls)

    def of_step(self, tokens: int, in_integers: int) -> NDArray[np.int64]:
        """Return [L, calls, WIDTH], valid until the next step."""
        self._rows[self._tokens] = tokens
        self._rows[self._in_integers] = in_integers
        self._rows[self._addresses] = [weight.data_ptr() for weight in self._weights]
        return self._rows.reshape(self._num_layers, -1, WIDTH)


class LayerCalls:
    """The calls of every layer, and the memory for data between them."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        kind_of: Sequence[int],
        config: ModelConfig,
        eps: float,
        tokens: int,
    ) -> None:
        """For steps of at most this many tokens.

        kind_of: the number of each layer's kind. eps: of the norms before attention and MLP.
        """
        self._layers, self._config, self._capacity = layers, config, tokens
        self._kind_of, self._num_kinds, self._eps = np.array(kind_of), max(kind_of) + 1, eps
        self._matrices, self._threads = matrices_of(layers), torch.get_num_threads()
        query, key = config.num_attention_heads, config.num_key_value_heads
        self._hidden = torch.empty(tokens, config.hidden_size)
        self._normed = torch.empty(tokens, config.hidden_size)
        self._heads = torch.empty(tokens, query + 2 * key, config.head_dim)
        self._attended = torch.empty(tokens, query, config.head_dim)
        self._gate_up = torch.empty(tokens, 2 * config.intermediate_size)
        self._gated = torch.empty(tokens, config.intermediate_size)
        inputs = self._normed, self._attended.flatten(1), self._gated
        num_bytes = max(packed_product.workspace_bytes(*x.shape) for x in inputs)
        self._workspace = torch.empty(num_bytes, dtype=torch.int8)
        self._head_weights = {
            rope_kv_write.BIAS: [x.qkv_bias for x in layers if x.qkv_bias is not None],
            rope_kv_write.QUERY_NORM: [x.query_norm for x in layers if x.query_norm is not None],
            rope_kv_write.KEY_NORM: [x.key_norm for x in layers if x.key_norm is not None],
        }
        """A number of a rotation -> the weights whose addresses it is: one a layer, or none."""
        self._tables: dict[tuple[bool, bool], LastingTable] = {}
        """For steps with rows that are summed up in integers, with others, with both."""

    def fit(self, tokens: int) -> bool:
        """Whether a step of this many tokens can use them: as long as the threads, each of which
        has memory of its own, and the packed weights are the same."""
        return (
            tokens <= self._capacity
            and self._threads == torch.get_num_threads()
            and self._matrices == matrices_of(self._layers)
        )

    def run_(
        self,
        hidden: Tensor,
        kinds_of_layers: Sequence[KindInputs],
        inputs: StepInputs,
        kv_layers: Sequence[Tensor],
    ) -> None:
        """Replace embeddings [T, hidden] by the output of the last layer; the arguments are those
        of `CausalLM.forward`, and the inputs of each kind of layers."""
        tokens = len(hidden)
        in_integers = integer_rows(inputs.attention.num_decodes, tokens)
        kinds = in_integers > 0, in_integers < tokens
        if kinds not in self._tables:
            self._tables[kinds] = LastingTable(
                [list(self._lasting(x, kinds)) for x in self._layers]
            )
        lasting = self._tables[kinds].of_step(tokens, in_integers)
        of_step: list[Call] = []
        for kind in kinds_of_layers:
            of_step += self._of_step(tokens, kind, inputs, kv_layers[0])
        attention = rows_of(of_step).reshape(self._num_kinds, -1, WIDTH)[self._kind_of]
        attention[:, :, 1 + CACHE] = [[layer.data_ptr()] for layer in kv_layers]
        for number, weights in self._head_weights.items():
            if weights:
                attention[:, 0, 1 + number] = [weight.data_ptr() for weight in weights]
        before, after = np.split(lasting, [1 + sum(kinds)], 1)
        self._hidden[:tokens] = hidden
        run_all(np.concatenate([before, attention, after], 1), self._threads)
        hidden.copy_(self._hidden[:tokens])

    def _lasting(self, layer: LayerWeights, kinds: tuple[bool, bool]) -> Iterator[LastingCall]:
        """A layer's calls in their order, all but rotation and attention."""
        heads, attended = self._heads.flatten(1), self._attended.flatten(1)
        yield self._norm(layer.attention_norm)
        yield from self._product(kinds, self._normed, layer.qkv, heads)
        yield from self._product(kinds, attended, layer.output, self._hidden, add=True)
        yield self._norm(layer.mlp_norm)
        yield from self._product(kinds, self._normed, layer.gate_up, self._gate_up)
        gate = silu_mul.call(self._gate_up, self._gated)
        yield LastingCall(gate, tokens_at=silu_mul.ROWS)
        yield from self._product(kinds, self._gated, layer.down, self._hidden, add=True)

    def _norm(self, weight: Tensor) -> LastingCall:
        call = rms_norm.call(self._hidden, weight, self._eps, self._normed)
        return LastingCall(call, rms_norm.ROWS, weight=weight, weight_at=rms_norm.WEIGHT)

    def _product(
        self, kinds: tuple[bool, bool], x: Tensor, linear: Linear, out: Tensor, *, add: bool = False
    ) -> Iterator[LastingCall]:
        assert linear.packed is not None
        tiles = linear.packed.tiles
        in_integers, others = kinds
        if not linear.packed.rounds:  # one call computes all rows, and the other one none
            call = packed_product.decode_call(x, tiles, out, self._workspace, add=add)
            yield LastingCall(
                call, packed_product.ROWS, weight=tiles, weight_at=packed_product.DECODE_TILES
            )
            if in_integers and others:
                empty = packed_product.decode_call(x[:0], tiles, out, self._workspace, add=add)
                yield LastingCall(empty)
            return
        if in_integers:
            yield LastingCall(
                packed_product.decode_call(
                    x, tiles, out, self._workspace, add=add, input_bits=linear.input_bits
                ),
                rows_at=packed_product.ROWS,
                weight=tiles,
                weight_at=packed_product.DECODE_TILES,
            )
        if others:
            yield LastingCall(
                packed_product.chunk_call(x, 0, tiles, out, self._workspace, add=add),
                tokens_at=packed_product.END,
                rows_at=packed_product.FIRST,
                weight=tiles,
                weight_at=packed_product.CHUNK_TILES,
            )

    def _of_step(
        self, tokens: int, kind: KindInputs, inputs: StepInputs, kv_layer: Tensor
    ) -> list[Call]:
        """Rotation and attention of a layer of this kind: alike in all but for addresses."""
        rotations, attends_to, slot_blocks = kind
        heads, attended = self._heads[:tokens], self._attended[:tokens]
        queries, first = heads[:, : self._config.num_attention_heads], self._layers[0]
        rotation = rope_kv_write.call(
            heads,
            rotations,
            kv_layer,
            slot_blocks,
            inputs.slot_offsets,
            first.qkv_bias,
            first.query_norm,
            first.key_norm,
            self._config.rms_norm_eps,
        )
        may_round = rounds(self._layers)
        return [
            rotation,
            *paged_attention.calls(queries, kv_layer, attends_to, attended, may_round=may_round),
        ]


@remembered
def have_kernels(head_dim: int) -> bool:
    """Whether there is a kernel for every call of a layer, and one that runs tables of them."""
    attends = paged_attention.has_decodes(head_dim) and paged_attention.has_kernels(head_dim)
    small = all(is_trusted(case, 0) for case in (NORM, ROTATION, GATE))
    return attends and small and has_packed_product() and call_table.is_available()


def _places(numbers: Iterable[int | None]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of a table: for each call, which of its numbers is meant."""
    found = [(row, 1 + number) for row, number in enumerate(numbers) if number is not None]
    rows, columns = np.array(found, np.int64).reshape(-1, 2).T
    return rows, columns


def rounds(layers: Sequence[AttentionWeights]) -> bool:
    """Whether products round their inputs, so that attention may, too; the first is as all are."""
    first = layers[0].qkv.packed
    return first is not None and first.rounds


def matrices_of(layers: Sequence[LayerWeights]) -> list[PackedMatrix | None]:
    """Return the matrices with which the layers compute products."""
    return [
        linear.packed
        for layer in layers
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
