"""Llama's layers, and those of all families that differ from it by flags (`FamilySpec`) or numbers
(`ModelConfig`).

Layers have one MLP, or a mixture of experts (Qwen3-MoE, gpt-oss). They are of a few kinds, which
differ by the window of attention and by RoPE; most models have one.

A model may multiply what a layer adds (Granite). Here all that is added before is divided instead,
which the norms do not see but for their epsilon.

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
from diptych_engine.models.layer import AttentionWeights, LayerWeights, MixtureWeights, empty_layer
from diptych_engine.models.layer_calls import (
    KindInputs,
    LayerCalls,
    have_kernels,
    matrices_of,
    rounds,
)
from diptych_engine.models.layer_slots import LayerPlaces, layer_linears
from diptych_engine.models.linear import Linear, gated
from diptych_engine.models.low_rank import add_low_rank
from diptych_engine.models.mixture import (
    add_chosen_bias_,
    mixture,
    route,
    stacked_mixture,
    stacks_pay,
)
from diptych_engine.models.rotation import rotation_of, rotation_table
from diptych_engine.models.shard import WHOLE, Shard
from diptych_frontend.model_files.model_config import ModelConfig, family_of
from diptych_kernels.paged_attention import paged_attention
from diptych_kernels.paged_attention.cpu import fills_vectors
from diptych_kernels.rms_norm import rms_norm
from diptych_kernels.rope_kv_write import rope_kv_write
from diptych_kernels.rope_kv_write.cpu import is_known


class LlamaModel(torch.nn.Module):
    """The weights and the arithmetic, without the state of any request."""

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
        group_of: Sequence[int] = (),
        *,
        packs: bool = False,
    ) -> None:
        """group_of: see `build_model`."""
        super().__init__()
        self._places = LayerPlaces.of(config, shard)
        self._reduce = shard.reduce
        self._family = family_of(config.architecture)
        self._prefix = self._family.text_prefix
        config = shard.local(config)
        self.config = config
        self._eps = config.rms_norm_eps / config.residual_scale**2
        self._embedding_scale = config.embedding_scale / config.residual_scale
        if self._family.scales_embeddings:  # which Gemma was trained with in the models' type
            self._embedding_scale = torch.tensor(self._embedding_scale, dtype=dtype).item()
        self._given_scale = 1.0 if self._family.scales_embeddings else self._embedding_scale
        """What embeddings that callers give are multiplied by: some families publish theirs as they
        are before that, some as they are after it."""
        self._num_query = config.num_attention_heads * config.head_dim
        self._num_rotated_heads = config.num_attention_heads + config.num_key_value_heads
        group_of = group_of or [0] * config.num_hidden_layers
        self._divided = max(group_of) > 0
        kinds = [
            (config.window_of(layer), rotation_of(config, layer), group_of[layer])
            for layer in range(config.num_hidden_layers)
        ]
        different = list(dict.fromkeys(kinds))
        self._kind_of = [different.index(kind) for kind in kinds]
        """The kind of each layer."""
        rotations = list(dict.fromkeys(rotation for _, rotation, _ in different))
        self._tables = [rotation_table(config, x, max_positions, device) for x in rotations]
        self._kinds = [(window, rotations.index(x), group) for window, x, group in different]
        """The window, the number of the rotations, and the group of each kind."""

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
        added = float(self._family.norms_from_one)
        self.slots = {f"{self._prefix}norm.weight": WeightSlot(self._final_norm, added=added)}
        """Made once: no view can be made of a weight that has no memory."""
        for _, published, matrix in self._token_rows:
            self.slots[published] = WeightSlot(matrix.weight.t())
            if packs:
                matrix.release()
        self._layers = [
            self._empty_layer(index, empty, stacked=stacked, packs=packs)
            for index in range(config.num_hidden_layers)
        ]
        self._dense = [layer for layer in self._layers if not layer.is_mixture]
        may_have_calls = device.type == "cpu" and dtype is torch.float32
        self._may_have_calls = may_have_calls and self._fits_calls()
        self._calls: LayerCalls | None = None

    def _empty_layer(
        self, index: int, empty: Callable[..., Tensor], *, stacked: bool, packs: bool
    ) -> LayerWeights | MixtureWeights:
        """Make a layer, and the slots of its weights. packs: those that may be packed have no
        memory before they are loaded."""
        layer = empty_layer(self.config, index, empty, stacked=stacked)
        for name, slot in self._places.slots(layer):
            self.slots[f"{self._prefix}layers.{index}.{name}"] = slot
        for linear, _ in layer_linears(layer) if packs else ():
            linear.release()
        return layer

    def _fits_calls(self) -> bool:
        """Whether `LayerCalls` compute all that these layers do."""
        return (
            self._reduce is None
            and fills_vectors(self.config.head_dim)
            and len(self._dense) == len(self._layers)
            and self._family.gate == "silu"
            and not self._family.norms_after
            and not (self.config.attention_softcap or self._family.attention_sinks)
        )

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
            for linear, names in layer_linears(layer):
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
        if self._embedding_scale != 1.0:
            hidden.mul_(self._embedding_scale)
        if inputs.given is not None:
            hidden.index_copy_(0, inputs.given.rows, inputs.given.values * self._given_scale)
        rotations: list[Tensor] = []
        for table in self._tables:
            rotations += (table.index_select(0, inputs.positions),)
        kinds: list[KindInputs] = []
        for window, number, group in self._kinds:
            attends_to, slot_blocks = inputs.attention, inputs.slot_blocks
            if self._divided:
                attends_to, slot_blocks = attends_to.within(window, group), slot_blocks[group]
            elif window is not None:
                attends_to = attends_to.within(window)
            kinds += ((rotations[number], attends_to, slot_blocks),)
        calls = self._calls_for(inputs, kv_layers[0])
        if calls is not None:
            calls.run_(hidden, kinds, inputs, kv_layers)
        else:
            self._run_layers_(hidden, kinds, inputs, kv_layers)
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
            self._calls = LayerCalls(self._dense, self._kind_of, self.config, self._eps, room)
        return self._calls

    def _run_layers_(
        self,
        hidden: Tensor,
        kinds: Sequence[KindInputs],
        inputs: StepInputs,
        kv_layers: Sequence[Tensor],
    ) -> None:
        """Turn embeddings [T, hidden] into what the last layer yields."""
        adapters, num_decodes = inputs.adapters, inputs.attention.num_decodes
        gate = self._family.gate
        plain = not adapters and self._reduce is None and not self._family.norms_after
        for index, (layer, kv_layer) in enumerate(zip(self._layers, kv_layers, strict=True)):
            normed = rms_norm(hidden, layer.attention_norm, self._eps)
            qkv = layer.qkv.product(normed, num_decodes)
            if adapters:
                add_low_rank(qkv, normed, adapters, index, "qkv")
            attended = self._attend(layer, qkv, kinds[self._kind_of[index]], inputs, kv_layer)
            if plain:
                layer.output.add_product_(hidden, attended, num_decodes)
            else:
                half = "output", layer.output, layer.norm_after_attention
                self._add_product(hidden, attended, half, inputs, index)
            if layer.output_bias is not None:
                hidden.add_(layer.output_bias)
            normed = rms_norm(hidden, layer.mlp_norm, self._eps)
            if layer.is_mixture:
                self._add_mixture_(hidden, normed, layer, inputs, index)
                continue
            gate_up = layer.gate_up.product(normed, num_decodes)
            if adapters:
                add_low_rank(gate_up, normed, adapters, index, "gate_up")
            inner = gated(gate_up, gate)
            if plain:
                layer.down.add_product_(hidden, inner, num_decodes)
            else:
                half = "down", layer.down, layer.norm_after_mlp
                self._add_product(hidden, inner, half, inputs, index)

    def _add_mixture_(
        self, hidden: Tensor, x: Tensor, layer: MixtureWeights, inputs: StepInputs, index: int
    ) -> None:
        """hidden += the experts' part; every rank routes alike and has a share of each expert."""
        config = self.config
        chosen, weights = route(
            x,
            layer.router,
            config.num_experts_per_tok,
            renormalise=config.norm_topk_prob,
            bias=layer.router_bias,
        )
        own = layer.gate_up_bias, self._family.gate
        if inputs.routed is not None:
            inputs.routed[:, index] = chosen
        if layer.stacks is not None:
            part = stacked_mixture(x, chosen, weights, layer.stacks, *own)
        else:
            num_decodes = inputs.attention.num_decodes
            part = mixture(x, chosen, weights, layer.experts, num_decodes, *own)
        if self._reduce is not None:
            self._reduce(part)
        hidden.add_(part)
        if layer.down_bias is not None:
            add_chosen_bias_(hidden, chosen, weights, layer.down_bias)

    def _add_product(
        self,
        hidden: Tensor,
        x: Tensor,
        half: tuple[str, Linear, Tensor | None],
        inputs: StepInputs,
        layer: int,
    ) -> None:
        """hidden += x @ weight, where every rank has some of x's columns and of weight's rows.

        half: the projection's fused name, the projection, and the norm of what it yields.
        """
        num_decodes = inputs.attention.num_decodes
        fused, linear, norm = half
        if self._reduce is None and norm is None:
            linear.add_product_(hidden, x, num_decodes)
            add_low_rank(hidden, x, inputs.adapters, layer, fused)
            return
        part = linear.product(x, num_decodes)
        add_low_rank(part, x, inputs.adapters, layer, fused)
        if self._reduce is not None:
            self._reduce(part)
        hidden.add_(part if norm is None else rms_norm(part, norm, self._eps))

    def _attend(
        self,
        layer: AttentionWeights,
        qkv: Tensor,
        kind: KindInputs,
        inputs: StepInputs,
        kv_layer: Tensor,
    ) -> Tensor:
        """Attention between its projections: [T, (H + 2 K) D] -> [T, H D]. Overwrites `qkv`."""
        rotations, attends_to, slot_blocks = kind
        heads = qkv.view(qkv.shape[0], -1, self.config.head_dim)
        rope_kv_write(
            heads,
            rotations,
            kv_layer,
            slot_blocks,
            inputs.slot_offsets,
            bias=layer.qkv_bias,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=self.config.rms_norm_eps,
        )
        queries = heads[:, : self.config.num_attention_heads]
        may_round = rounds(self._layers)
        attended = paged_attention(
            queries,
            kv_layer,
            attends_to,
            may_round=may_round,
            sinks=layer.sinks,
            softcap=self.config.attention_softcap,
        )
        return attended.flatten(1)

    def normed(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self._final_norm, self._eps)

    def logits(self, hidden: Tensor) -> Tensor:
        normed = self.normed(hidden)
        logits, cap = self._head.product(normed, normed.shape[0]), self.config.logits_softcap
        if self.config.logits_divisor != 1.0:
            logits.div_(self.config.logits_divisor)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits
