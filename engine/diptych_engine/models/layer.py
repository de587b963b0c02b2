"""The weights of one layer of a Llama-like model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from torch import Tensor

from diptych_engine.models.linear import Linear
from diptych_frontend.model_files.model_config import ModelConfig, family_of


@dataclass(slots=True, frozen=True)
class AttentionWeights:
    """H query heads, K key-value heads, D head_dim; the heads are those of this rank."""

    attention_norm: Tensor
    qkv: Linear
    """[hidden, (H + 2 K) D]: query heads, key heads, value heads."""
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    """[H D, hidden]."""
    mlp_norm: Tensor
    output_bias: Tensor | None
    sinks: Tensor | None
    """[H]: the score of a key that every token sees, and which has no value."""
    norm_after_attention: Tensor | None
    norm_after_mlp: Tensor | None

    def parts(self) -> Iterator[tuple[str, Tensor | Linear]]:
        """Return all weights of the layer, by the model's own names."""
        for field in fields(self):
            part = getattr(self, field.name)
            if isinstance(part, tuple):
                for index, member in enumerate(part):
                    for name in ("gate_up", "down"):
                        yield f"{field.name}.{index}.{name}", getattr(member, name)
            elif isinstance(part, Tensor | Linear):
                yield field.name, part


@dataclass(slots=True, frozen=True)
class LayerWeights(AttentionWeights):
    """A layer whose MLP computes every token."""

    is_mixture: ClassVar[Literal[False]] = False
    gate_up: Linear
    """[hidden, 2 intermediate]."""
    down: Linear
    """[intermediate, hidden]."""


@dataclass(slots=True, frozen=True)
class Expert:
    """One MLP of a mixture, with this rank's share of its inner dimension."""

    gate_up: Linear
    """[hidden, 2 inner]."""
    down: Linear
    """[inner, hidden]."""


@dataclass(slots=True, frozen=True)
class ExpertStacks:
    """The matrices of all experts of a layer; each expert's matrices are views of them."""

    gate_up: Tensor
    """[experts, hidden, 2 inner]."""
    down: Tensor
    """[experts, inner, hidden]."""


@dataclass(slots=True, frozen=True)
class MixtureWeights(AttentionWeights):
    """A layer with a mixture of experts: every token goes through a few of them."""

    is_mixture: ClassVar[Literal[True]] = True
    router: Tensor
    """[hidden, experts]; the same on every rank."""
    router_bias: Tensor | None
    gate_up_bias: Tensor | None
    """[experts, 2 inner]."""
    down_bias: Tensor | None
    """[experts, hidden]; the same on every rank."""
    experts: tuple[Expert, ...]
    stacks: ExpertStacks | None
    """None: each expert has memory of its own, and may be packed."""


def empty_layer(
    config: ModelConfig, index: int, empty: Callable[..., Tensor], *, stacked: bool
) -> LayerWeights | MixtureWeights:
    """Return a layer's weights, still undefined.

    config: of this rank. index: of the layer. empty: makes a tensor of a shape. stacked: all
    experts of a mixture share one memory.
    """
    family = family_of(config.architecture)
    heads = config.num_attention_heads
    num_qkv = (heads + 2 * config.num_key_value_heads) * config.head_dim
    hidden = config.hidden_size

    def mlp(inner: int) -> tuple[Linear, Linear]:
        return Linear(empty(hidden, 2 * inner)), Linear(empty(inner, hidden))

    attention = (
        empty(hidden),
        Linear(empty(hidden, num_qkv)),
        empty(num_qkv) if config.attention_bias else None,
        empty(config.head_dim) if config.qk_norm else None,
        empty(config.head_dim) if config.qk_norm else None,
        Linear(empty(heads * config.head_dim, hidden)),
        empty(hidden),
        empty(hidden) if family.output_bias else None,
        empty(heads) if family.attention_sinks else None,
        empty(hidden) if family.norms_after else None,
        empty(hidden) if family.norms_after else None,
    )
    if not config.has_experts(index):
        return LayerWeights(*attention, *mlp(config.intermediate_size))
    num_experts, inner = config.num_experts, config.moe_intermediate_size
    routing = (
        empty(hidden, num_experts),
        empty(num_experts) if family.expert_bias else None,
        empty(num_experts, 2 * inner) if family.expert_bias else None,
        empty(num_experts, hidden) if family.expert_bias else None,
    )
    if not stacked:
        experts = tuple(Expert(*mlp(inner)) for _ in range(num_experts))
        return MixtureWeights(*attention, *routing, experts, None)
    stacks = ExpertStacks(empty(num_experts, hidden, 2 * inner), empty(num_experts, inner, hidden))
    views = zip(stacks.gate_up, stacks.down, strict=True)
    experts = tuple(Expert(Linear(gate_up), Linear(down)) for gate_up, down in views)
    return MixtureWeights(*attention, *routing, experts, stacks)
