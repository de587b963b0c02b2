"""How the layers of a model differ from each other and from Llama's, as its files say it.

config.json lists such things layer by layer, or every how many layers they occur; a GGUF file
leaves most of them to the program that knows the architecture (`FamilySpec`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from diptych_frontend.model_files.family_spec import FamilySpec
from diptych_protocol import InvalidRequestError
from diptych_protocol.errors import converted

FULL: Final = "full_attention"
WINDOWED: Final = "sliding_attention"
LAYER_TYPES: Final = (FULL, "attention", WINDOWED)
MAX_LAYERS: Final = 1 << 16
Scale = Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]
"""What is multiplied or divided by."""


class HFLayerKeys(msgspec.Struct):
    """The part of config.json that describes layers; a family that has no such key ignores it."""

    layer_types: list[str] | None = None
    sliding_window_pattern: int | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int | None = None
    position_embedding_type: str | None = None
    partial_rotary_factor: Scale | None = None
    rope_local_base_freq: Scale | None = None
    embedding_multiplier: Scale | None = None
    residual_multiplier: Scale | None = None
    attention_multiplier: Scale | None = None
    query_pre_attn_scalar: Scale | None = None
    logits_scaling: Scale | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None

    def refuse_others(self, family: FamilySpec) -> None:
        """Raise `InvalidRequestError` for arithmetic that no family has yet."""
        if self.use_bidirectional_attention:
            raise unsupported("use_bidirectional_attention")
        for field, only in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
            if getattr(self, field) not in (None, only):
                raise unsupported(f"{field} {getattr(self, field)}, not {only}")
        if family.position_embedding_type not in (None, self.position_embedding_type):
            raise unsupported(f"position_embedding_type {self.position_embedding_type!r}")


class GGUFLayerKeys(msgspec.Struct):
    """The metadata that describes layers. Each key has the architecture's name as its prefix."""

    pattern: int | list[bool] | None = msgspec.field(
        name="attention.sliding_window_pattern", default=None
    )
    window_rope_theta: Scale | None = msgspec.field(name="rope.freq_base_swa", default=None)
    finetuned: bool = msgspec.field(name="rope.scaling.finetuned", default=True)
    embedding_scale: Scale | None = None
    residual_scale: Scale = 1.0
    attention_scale: Scale | None = msgspec.field(name="attention.scale", default=None)
    logits_divisor: Scale = msgspec.field(name="logit_scale", default=1.0)
    attention_softcap: float | None = msgspec.field(name="attn_logit_softcapping", default=None)
    logits_softcap: float | None = msgspec.field(name="final_logit_softcapping", default=None)


def layers_from_gguf(
    keys: GGUFLayerKeys, family: FamilySpec, layers: int, hidden_size: int
) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that describe layers."""
    if isinstance(keys.pattern, list):  # whether each layer has a window
        full = tuple(index for index, windowed in enumerate(keys.pattern[:layers]) if not windowed)
    else:
        full = every(keys.pattern or family.window_period, layers)
    no_rope = family.gguf_finetuned_is_rope and not keys.finetuned
    return {
        "full_layers": full,
        "unrotated_layers": every(1 if no_rope else family.unrotated_period, layers),
        "window_rope_theta": keys.window_rope_theta or family.window_rope_theta,
        "embedding_scale": keys.embedding_scale or _embedding_scale(family, hidden_size),
        "residual_scale": keys.residual_scale,
        "attention_scale": keys.attention_scale or family.gguf_attention_scales.get(layers),
        "logits_divisor": keys.logits_divisor,
        **_softcaps(keys.attention_softcap, keys.logits_softcap, family),
    }


def layers_from_hf(
    raw: Mapping[str, Any], family: FamilySpec, layers: int, head_dim: int, hidden_size: int
) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that describe layers."""
    keys = converted(raw, HFLayerKeys, "model configuration", "model")
    keys.refuse_others(family)
    rope, local = rope_from_hf(raw), rope_from_hf(raw, WINDOWED)
    rotated = rope.get("partial_rotary_factor", keys.partial_rotary_factor)
    scalar = keys.query_pre_attn_scalar
    return {
        "full_layers": _full_layers(keys, family, layers),
        "unrotated_layers": _unrotated_layers(keys, family, layers),
        "window_rope_theta": _window_rope_theta(keys, family, local),
        "rotary_dim": _rotary_dim(rotated, head_dim),
        "embedding_scale": keys.embedding_multiplier or _embedding_scale(family, hidden_size),
        "residual_scale": keys.residual_multiplier or 1.0,
        "attention_scale": keys.attention_multiplier if scalar is None else scalar**-0.5,
        "logits_divisor": keys.logits_scaling or 1.0,
        **_softcaps(keys.attn_logit_softcapping, keys.final_logit_softcapping, family),
    }


def rope_from_hf(raw: Mapping[str, Any], layer_type: str = FULL) -> dict[str, Any]:
    """Return the parameters of RoPE; where each type of layers has its own, those of one type."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise unsupported(f"RoPE parameters {rope!r}")
    if FULL in rope or WINDOWED in rope:
        rope = rope.get(layer_type) or {}
    elif layer_type != FULL:
        rope = {}
    if not isinstance(rope, dict):
        raise unsupported(f"RoPE parameters {rope!r}")
    trained = raw.get("original_max_position_embeddings")
    return rope if trained is None else {**rope, "original_max_position_embeddings": trained}


def every(period: int, layers: int) -> tuple[int, ...]:
    """Return the last layer of each `period`; 0: none."""
    if layers > MAX_LAYERS:  # before there is a list of them
        raise unsupported(f"num_hidden_layers is {layers}")
    return tuple(range(period - 1, layers, period)) if period > 0 else ()


def _embedding_scale(family: FamilySpec, hidden_size: int) -> float:
    return math.sqrt(hidden_size) if family.scales_embeddings and hidden_size > 0 else 1.0


def _softcaps(attention: float | None, logits: float | None, family: FamilySpec) -> dict[str, Any]:
    defaults = family.config_defaults  # a GGUF file may leave them out too
    if attention is None:
        attention = defaults.get("attn_logit_softcapping", 0.0)
    if logits is None:
        logits = defaults.get("final_logit_softcapping", 0.0)
    return {"attention_softcap": attention, "logits_softcap": logits}


def _window_rope_theta(
    keys: HFLayerKeys, family: FamilySpec, rope: Mapping[str, Any]
) -> float | None:
    """The base for layers with a window, in a family where they have one of their own."""
    if family.window_rope_theta is None:
        return None
    if rope.get("rope_type", "default") != "default":
        raise unsupported("scaled RoPE in layers with a window")
    return rope_theta(rope, keys.rope_local_base_freq or family.window_rope_theta)


def rope_theta(rope: Mapping[str, Any], default: float) -> float:
    """Return the base that the parameters of RoPE name."""
    value = rope.get("rope_theta", default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise unsupported(f"RoPE parameter rope_theta is {value!r}")
    return value


def _full_layers(keys: HFLayerKeys, family: FamilySpec, layers: int) -> tuple[int, ...]:
    if keys.layer_types is None:
        return every(keys.sliding_window_pattern or family.window_period, layers)
    others = sorted(set(keys.layer_types) - set(LAYER_TYPES))
    if others or len(keys.layer_types) != layers:
        raise unsupported(f"layer_types {', '.join(others) or 'of another number of layers'}")
    if not family.uses_window:
        return ()
    return tuple(index for index, kind in enumerate(keys.layer_types) if kind != WINDOWED)


def _unrotated_layers(keys: HFLayerKeys, family: FamilySpec, layers: int) -> tuple[int, ...]:
    if not family.unrotated_period:
        return ()
    if keys.no_rope_layers is None:
        return every(keys.no_rope_layer_interval or family.unrotated_period, layers)
    if len(keys.no_rope_layers) < layers:
        raise unsupported(f"no_rope_layers of {len(keys.no_rope_layers)} of {layers} layers")
    return tuple(index for index in range(layers) if not keys.no_rope_layers[index])


def _rotary_dim(factor: Any, head_dim: int) -> int:
    if factor in (None, 1):
        return 0
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise unsupported(f"partial_rotary_factor {factor!r}")
    return int(head_dim * factor)


def unsupported(what: str) -> InvalidRequestError:
    """Return the error of a model that cannot be computed."""
    return InvalidRequestError(f"model not supported: {what}", param="model")
