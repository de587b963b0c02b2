"""The places of a layer's weights, by the names that published tensors have in Llama, or which they
are given (`FamilySpec.parts`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from diptych_engine.models.interface import WeightSlot
from diptych_engine.models.layer import AttentionWeights, Expert, LayerWeights, MixtureWeights
from diptych_engine.models.linear import Linear
from diptych_engine.models.shard import Shard, Span
from diptych_frontend.model_files.model_config import ModelConfig, family_of

Linears = list[tuple[Linear, tuple[str, ...]]]
"""Projections, each with the published ones that lie side by side in it."""


@dataclass(slots=True, frozen=True)
class LayerPlaces:
    """What a rank has of every layer."""

    config: ModelConfig
    """That of this rank."""
    heads: Span
    query_rows: Span
    key_rows: Span
    inner: Span
    expert_inner: Span

    @classmethod
    def of(cls, config: ModelConfig, shard: Shard) -> LayerPlaces:
        """config: of the whole model."""
        heads, dim = config.num_attention_heads, config.head_dim
        return cls(
            shard.local(config),
            shard.share(heads),
            shard.share(heads, dim),
            shard.share(config.num_key_value_heads, dim),
            shard.share(config.intermediate_size),
            shard.share(config.moe_intermediate_size),
        )

    def slots(self, layer: LayerWeights | MixtureWeights) -> Iterator[tuple[str, WeightSlot]]:
        """Yield the slots of a layer, by names inside it."""
        output = WeightSlot(layer.output.weight.t(), columns=self.query_rows)
        yield "self_attn.o_proj.weight", output
        added = float(family_of(self.config.architecture).norms_from_one)
        for name, norm in (
            ("input_layernorm", layer.attention_norm),
            ("post_attention_layernorm", layer.mlp_norm),
            ("norm_after_attention", layer.norm_after_attention),
            ("norm_after_mlp", layer.norm_after_mlp),
        ):
            if norm is not None:
                yield f"{name}.weight", WeightSlot(norm, added=added)
        if not layer.is_mixture:
            yield from _mlp_slots("mlp.", layer, self.inner)
        else:
            yield from self._mixture(layer)
        yield from self._heads(layer)

    def _heads(self, layer: AttentionWeights) -> Iterator[tuple[str, WeightSlot]]:
        config, dim = self.config, self.config.head_dim
        sizes = [config.num_attention_heads * dim] + [config.num_key_value_heads * dim] * 2
        rotated = config.rotary_dim
        for kind, fused in (("weight", layer.qkv.weight.t()), ("bias", layer.qkv_bias)):
            if fused is not None:
                query, key, value = torch.split(fused, sizes)
                yield f"self_attn.q_proj.{kind}", WeightSlot(query, dim, rotated, self.query_rows)
                yield f"self_attn.k_proj.{kind}", WeightSlot(key, dim, rotated, self.key_rows)
                yield f"self_attn.v_proj.{kind}", WeightSlot(value, rows=self.key_rows)
        added = float(family_of(config.architecture).norms_from_one)
        for name, norm in (("q_norm", layer.query_norm), ("k_norm", layer.key_norm)):
            if norm is not None:
                yield f"self_attn.{name}.weight", WeightSlot(norm, dim, rotated, added=added)
        if layer.output_bias is not None:
            yield "self_attn.o_proj.bias", WeightSlot(layer.output_bias)
        if layer.sinks is not None:
            yield "self_attn.sinks", WeightSlot(layer.sinks, rows=self.heads)

    def _mixture(self, layer: MixtureWeights) -> Iterator[tuple[str, WeightSlot]]:
        yield "mlp.gate.weight", WeightSlot(layer.router.t())
        if layer.router_bias is not None:
            yield "mlp.gate.bias", WeightSlot(layer.router_bias)
        for index, expert in enumerate(layer.experts):
            prefix = f"mlp.experts.{index}."
            yield from _mlp_slots(prefix, expert, self.expert_inner)
            if layer.gate_up_bias is not None and layer.down_bias is not None:
                gate, up = layer.gate_up_bias[index].chunk(2)
                yield f"{prefix}gate_proj.bias", WeightSlot(gate, rows=self.expert_inner)
                yield f"{prefix}up_proj.bias", WeightSlot(up, rows=self.expert_inner)
                yield f"{prefix}down_proj.bias", WeightSlot(layer.down_bias[index])


def layer_linears(layer: LayerWeights | MixtureWeights) -> Linears:
    """Return the projections of a layer that may be packed: not those of experts that share one
    memory."""
    linears: Linears = [
        (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.output, ("self_attn.o_proj",)),
    ]
    if not layer.is_mixture:
        return linears + _mlp_linears("mlp.", layer)
    for number, expert in enumerate(layer.experts if layer.stacks is None else ()):
        linears += _mlp_linears(f"mlp.experts.{number}.", expert)
    return linears


def _mlp_slots(
    prefix: str, mlp: LayerWeights | Expert, inner: Span
) -> Iterator[tuple[str, WeightSlot]]:
    """inner: this rank's share of the inner dimension."""
    gate, up = mlp.gate_up.weight.t().chunk(2)
    yield f"{prefix}gate_proj.weight", WeightSlot(gate, rows=inner)
    yield f"{prefix}up_proj.weight", WeightSlot(up, rows=inner)
    yield f"{prefix}down_proj.weight", WeightSlot(mlp.down.weight.t(), columns=inner)


def _mlp_linears(prefix: str, mlp: LayerWeights | Expert) -> Linears:
    return [
        (mlp.gate_up, (f"{prefix}gate_proj", f"{prefix}up_proj")),
        (mlp.down, (f"{prefix}down_proj",)),
    ]
