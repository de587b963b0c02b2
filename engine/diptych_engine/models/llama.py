"""The Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3, which differ by a few flags.

Layers have one MLP, or a mixture of experts (Qwen3-MoE).

Shapes: T tokens of the step, H query heads, K key-value heads, D head_dim; of the heads, those of
this rank.
Projections that read the same input are fused: query, key and value; gate and up. They are stored
[in, out], the transpose of what is published: the product with a single row is then 30% faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from diptych_engine.models.interface import Packable, Projection, StepInputs, WeightSlot
from diptych_engine.models.layer import (
    AttentionWeights,
    Expert,
    LayerWeights,
    MixtureWeights,
    empty_layer,
)
from diptych_engine.models.layer_calls import LayerCalls, have_kernels, matrices_of, rounds
from diptych_engine.models.linear import Linear
from diptych_engine.models.low_rank import add_low_rank
from diptych_engine.models.mixture import mixture, route, stacked_mixture, stacks_pay
from diptych_engine.models.rotation import rotation_table
from diptych_engine.models.shard import WHOLE, Shard, Span
from diptych_frontend.model_files.model_config import ModelConfig, family_of
from diptych_kernels.native.layout import is_known
from diptych_kernels.paged_attention import paged_attention
from diptych_kernels.paged_attention.cpu import fills_vectors
from diptych_kernels.rms_norm import rms_norm
from diptych_kernels.rope_kv_write import rope_kv_write
from diptych_kernels.silu_mul import silu_mul


class LlamaModel(torch.nn.Module):
    """The weights and the arithmetic, without the state of any request."""

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__()
        dim = config.head_dim
        self._query_rows = shard.share(config.num_attention_heads, dim)
        self._key_rows = shard.share(config.num_key_value_heads, dim)
        self._inner_rows = shard.share(config.intermediate_size)
        self._expert_rows = shard.share(config.moe_intermediate_size)
        self._reduce = shard.reduce
        self._prefix = family_of(config.architecture).text_prefix
        config = shard.local(config)
        self.config = config
        self._eps = config.rms_norm_eps
        self._num_query = config.num_attention_heads * config.head_dim
        self._num_rotated_heads = config.num_attention_heads + config.num_key_value_heads
        self._rotations = rotation_table(config, max_positions, device)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self._embedding = Linear(empty(config.vocab_size, config.hidden_size).t())
        self._head = self._embedding
        self._token_rows = [("embedding", f"{self._prefix}embed_tokens.weight", self._embedding)]
        """Matrices with a row for each token, by their own and published names. Under both they are
        [vocabulary, hidden], the transpose of `Linear.weight`."""
        if not config.tie_word_embeddings:
            self._head = Linear(empty(config.vocab_size, config.hidden_size).t())
            self._token_rows.append(("head", "lm_head.weight", self._head))
        self._final_norm = empty(config.hidden_size)
        stacked = stacks_pay(config, device, dtype)
        self._layers = [
            empty_layer(config, index, empty, stacked=stacked)
            for index in range(config.num_hidden_layers)
        ]
        self._dense = [layer for layer in self._layers if not layer.is_mixture]
        self.slots = self._all_slots()
        """Made once: no view can be made of a weight that has no memory."""

        self._may_have_calls = (
            device.type == "cpu"
            and dtype is torch.float32
            and self._reduce is None
            and fills_vectors(config.head_dim)
            and len(self._dense) == len(self._layers)
        )
        self._calls: LayerCalls | None = None

    def _all_slots(self) -> dict[str, WeightSlot]:
        slots = {
            published: WeightSlot(matrix.weight.t()) for _, published, matrix in self._token_rows
        }
        slots[f"{self._prefix}norm.weight"] = WeightSlot(self._final_norm)
        for index, layer in enumerate(self._layers):
            for name, slot in self._layer_slots(layer).items():
                slots[f"{self._prefix}layers.{index}.{name}"] = slot
        return slots

    def _layer_slots(self, layer: LayerWeights | MixtureWeights) -> dict[str, WeightSlot]:
        dim = self.config.head_dim
        num_key = self.config.num_key_value_heads * dim
        slots = {
            "input_layernorm.weight": WeightSlot(layer.attention_norm),
            "self_attn.o_proj.weight": WeightSlot(
                layer.output.weight.t(), columns=self._query_rows
            ),
            "post_attention_layernorm.weight": WeightSlot(layer.mlp_norm),
        }
        if not layer.is_mixture:
            slots |= _mlp_slots("mlp.", layer, self._inner_rows)
        else:
            slots["mlp.gate.weight"] = WeightSlot(layer.router.t())
            for index, expert in enumerate(layer.experts):
                slots |= _mlp_slots(f"mlp.experts.{index}.", expert, self._expert_rows)
        for kind, fused in (("weight", layer.qkv.weight.t()), ("bias", layer.qkv_bias)):
            if fused is not None:
                query, key, value = torch.split(fused, [self._num_query, num_key, num_key])
                slots[f"self_attn.q_proj.{kind}"] = WeightSlot(query, dim, self._query_rows)
                slots[f"self_attn.k_proj.{kind}"] = WeightSlot(key, dim, self._key_rows)
                slots[f"self_attn.v_proj.{kind}"] = WeightSlot(value, rows=self._key_rows)
        if layer.query_norm is not None and layer.key_norm is not None:
            slots["self_attn.q_norm.weight"] = WeightSlot(layer.query_norm, rotary_dim=dim)
            slots["self_attn.k_norm.weight"] = WeightSlot(layer.key_norm, rotary_dim=dim)
        return slots

    @property
    def fused_slots(self) -> dict[str, WeightSlot]:
        tokens = {name: self.slots[published] for name, published, _ in self._token_rows}
        return tokens | {
            name: WeightSlot(part.weight if isinstance(part, Linear) else part)
            for name, part in self._named_parts()
        }

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """As `CausalLM.named_parameters`, with the arguments of `torch.nn.Module`. The model has no
        modules of its own: its layers are tensors, which fused kernels read."""
        tokens = ((name, matrix.values().t()) for name, _, matrix in self._token_rows)
        others = (
            (name, part.values() if isinstance(part, Linear) else part)
            for name, part in self._named_parts()
        )
        for name, values in chain(tokens, others):
            yield f"{prefix}.{name}" if prefix else name, values

    def _named_parts(self) -> Iterator[tuple[str, Tensor | Linear]]:
        """All weights but the `_token_rows`."""
        yield "final_norm", self._final_norm
        for index, layer in enumerate(self._layers):
            for name, part in layer.parts():
                yield f"layers.{index}.{name}", part

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def projections(self) -> dict[str, Projection]:
        config = self.config
        key, value = self._num_query, self._num_rotated_heads * config.head_dim
        places = {
            "self_attn.q_proj": ("qkv", 0),
            "self_attn.k_proj": ("qkv", key),
            "self_attn.v_proj": ("qkv", value),
            "self_attn.o_proj": ("output", 0),
        }
        if len(self._dense) == len(self._layers):
            places["mlp.gate_proj"] = ("gate_up", 0)
            places["mlp.up_proj"] = ("gate_up", config.intermediate_size)
            places["mlp.down_proj"] = ("down", 0)
        return {
            name: Projection(fused, start, self.slots[f"{self._prefix}layers.0.{name}.weight"])
            for name, (fused, start) in places.items()
        }

    @property
    def packables(self) -> list[Packable]:
        # Every logit depends on them, so that 4 bits would cost more here than in a layer.
        packables = [Packable(matrix, (published,), 8) for _, published, matrix in self._token_rows]
        for index, layer in enumerate(self._layers):
            linears: list[tuple[Linear, tuple[str, ...]]] = [
                (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                (layer.output, ("self_attn.o_proj",)),
            ]
            if not layer.is_mixture:
                linears += _mlp_linears("mlp.", layer)
            else:
                for number, expert in enumerate(layer.experts):
                    linears += _mlp_linears(f"mlp.experts.{number}.", expert)
            for linear, names in linears:
                published = tuple(f"{self._prefix}layers.{index}.{name}.weight" for name in names)
                packables.append(Packable(linear, published))
        return packables

    @property
    def encode_images(self) -> Callable[[Tensor], Tensor] | None:
        return None

    @property
    def weight_memory(self) -> Iterator[Tensor]:
        tokens = (matrix for _, _, matrix in self._token_rows)
        for part in chain(tokens, (part for _, part in self._named_parts())):
            yield part.memory if isinstance(part, Linear) else part

    def forward(self, inputs: StepInputs, kv_layers: Sequence[Tensor]) -> Tensor:
        hidden = self._embedding.columns(inputs.token_ids)
        if inputs.given is not None:
            hidden.index_copy_(0, inputs.given.rows, inputs.given.values)
        rotations = self._rotations.index_select(0, inputs.positions)
        calls = self._calls_for(inputs, kv_layers[0])
        if calls is not None:
            calls.run_(hidden, rotations, inputs, kv_layers)
        else:
            self._run_layers_(hidden, rotations, inputs, kv_layers)
        return hidden

    def _calls_for(self, inputs: StepInputs, kv_layer: Tensor) -> LayerCalls | None:
        """The layers as a table of calls, if there is a kernel for all that the step needs."""
        if not self._may_have_calls or inputs.adapters or not is_known(kv_layer):
            return None
        tokens = len(inputs.token_ids)
        if self._calls is None or not self._calls.fit(tokens):
            if None in matrices_of(self._dense) or not have_kernels(self.config.head_dim):
                return None
            room = 1 << (tokens - 1).bit_length()
            self._calls = LayerCalls(self._dense, self.config, room)
        return self._calls

    def _run_layers_(
        self, hidden: Tensor, rotations: Tensor, inputs: StepInputs, kv_layers: Sequence[Tensor]
    ) -> None:
        """Turn embeddings [T, hidden] into what the last layer yields."""
        adapters, num_decodes = inputs.adapters, inputs.attention.num_decodes
        plain = not adapters and self._reduce is None
        for index, (layer, kv_layer) in enumerate(zip(self._layers, kv_layers, strict=True)):
            normed = rms_norm(hidden, layer.attention_norm, self._eps)
            qkv = layer.qkv.product(normed, num_decodes)
            if adapters:
                add_low_rank(qkv, normed, adapters, index, "qkv")
            attended = self._attend(layer, qkv, rotations, inputs, kv_layer)
            if plain:
                layer.output.add_product_(hidden, attended, num_decodes)
            else:
                self._add_product(hidden, attended, layer.output, inputs, index, "output")
            normed = rms_norm(hidden, layer.mlp_norm, self._eps)
            if layer.is_mixture:
                self._add_mixture_(hidden, normed, layer, inputs, index)
                continue
            gate_up = layer.gate_up.product(normed, num_decodes)
            if adapters:
                add_low_rank(gate_up, normed, adapters, index, "gate_up")
            gated = silu_mul(gate_up)
            if plain:
                layer.down.add_product_(hidden, gated, num_decodes)
            else:
                self._add_product(hidden, gated, layer.down, inputs, index, "down")

    def _add_mixture_(
        self, hidden: Tensor, x: Tensor, layer: MixtureWeights, inputs: StepInputs, index: int
    ) -> None:
        """hidden += the experts' part; every rank routes alike and has a share of each expert."""
        config = self.config
        chosen, weights = route(
            x, layer.router, config.num_experts_per_tok, renormalise=config.norm_topk_prob
        )
        if inputs.routed is not None:
            inputs.routed[:, index] = chosen
        if layer.stacks is not None:
            part = stacked_mixture(x, chosen, weights, layer.stacks)
        else:
            part = mixture(x, chosen, weights, layer.experts, inputs.attention.num_decodes)
        if self._reduce is not None:
            self._reduce(part)
        hidden.add_(part)

    def _add_product(
        self, hidden: Tensor, x: Tensor, linear: Linear, inputs: StepInputs, layer: int, fused: str
    ) -> None:
        """hidden += x @ weight, where every rank has some of x's columns and of weight's rows."""
        num_decodes = inputs.attention.num_decodes
        if self._reduce is None:
            linear.add_product_(hidden, x, num_decodes)
            add_low_rank(hidden, x, inputs.adapters, layer, fused)
            return
        part = linear.product(x, num_decodes)
        add_low_rank(part, x, inputs.adapters, layer, fused)
        self._reduce(part)
        hidden.add_(part)

    def _attend(
        self,
        layer: AttentionWeights,
        qkv: Tensor,
        rotations: Tensor,
        inputs: StepInputs,
        kv_layer: Tensor,
    ) -> Tensor:
        """Attention between its projections: [T, (H + 2 K) D] -> [T, H D]. Overwrites `qkv`."""
        heads = qkv.view(qkv.shape[0], -1, self.config.head_dim)
        rope_kv_write(
            heads,
            rotations,
            kv_layer,
            inputs.slot_blocks,
            inputs.slot_offsets,
            bias=layer.qkv_bias,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=self._eps,
        )
        queries = heads[:, : self.config.num_attention_heads]
        may_round = rounds(self._layers)
        attended = paged_attention(queries, kv_layer, inputs.attention, may_round=may_round)
        return attended.flatten(1)

    def normed(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self._final_norm, self._eps)

    def logits(self, hidden: Tensor) -> Tensor:
        normed = self.normed(hidden)
        return self._head.product(normed, normed.shape[0])


def _mlp_slots(prefix: str, mlp: LayerWeights | Expert, inner: Span) -> dict[str, WeightSlot]:
    """inner: this rank's share of the inner dimension."""
    gate, up = mlp.gate_up.weight.t().chunk(2)
    return {
        f"{prefix}gate_proj.weight": WeightSlot(gate, rows=inner),
        f"{prefix}up_proj.weight": WeightSlot(up, rows=inner),
        f"{prefix}down_proj.weight": WeightSlot(mlp.down.weight.t(), columns=inner),
    }


def _mlp_linears(prefix: str, mlp: LayerWeights | Expert) -> list[tuple[Linear, tuple[str, ...]]]:
    """The projections, each with the published ones that lie side by side in it."""
    return [
        (mlp.gate_up, (f"{prefix}gate_proj", f"{prefix}up_proj")),
        (mlp.down, (f"{prefix}down_proj",)),
    ]
