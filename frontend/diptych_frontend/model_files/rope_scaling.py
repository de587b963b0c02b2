"""The rules that stretch RoPE's frequencies for texts longer than those of training.

Both formats name the rules alike. A GGUF file may also have the result of a rule, one divisor for
each frequency; Llama 3.1 and 3.2 come that way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

import msgspec

from diptych_protocol import InvalidRequestError

DIVISORS: Final = "rope_freqs.weight"
"""The tensor of a GGUF file that has a divisor for each frequency."""
SHORT: Final = "rope_factors_short.weight"
LONG: Final = "rope_factors_long.weight"
"""Tensors with such divisors for short and for long texts."""
ROPE_VECTORS: Final = (DIVISORS, SHORT, LONG)
Vector = tuple[float, ...]
Amount = Annotated[float, msgspec.Meta(ge=1e-6, le=1e9)]
"""Wider than the numbers of real models, and safe in logarithms and quotients."""
Weight = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class LinearScaling(msgspec.Struct, frozen=True, tag="linear", tag_field="rope_type"):
    """Every frequency is divided by `factor`."""

    magnitude: ClassVar[float] = 1.0
    """What rotated queries and keys are multiplied by."""
    all_divisors: ClassVar[Mapping[str, Vector]] = {}
    """Lists of divisors, one for each frequency, by their names."""
    factor: Amount


class Llama3(msgspec.Struct, frozen=True, tag="llama3", tag_field="rope_type"):
    """Llama 3.1's rule: slow frequencies are divided by `factor`, fast ones are kept, and those
    between are blended by the turns that they make in training."""

    magnitude: ClassVar[float] = 1.0
    all_divisors: ClassVar[Mapping[str, Vector]] = {}
    factor: Amount
    low_freq_factor: Amount
    high_freq_factor: Amount
    original_max_position_embeddings: Amount


class Yarn(msgspec.Struct, frozen=True, tag="yarn", tag_field="rope_type"):
    """YaRN: as `Llama3`, but blended by a frequency's place between two bounds, and scores grow."""

    all_divisors: ClassVar[Mapping[str, Vector]] = {}
    factor: Amount
    original_max_position_embeddings: Amount
    beta_fast: Amount = 32.0
    beta_slow: Amount = 1.0
    truncate: bool = True
    """The bounds are rounded outwards to whole places."""
    attention_factor: Amount | None = None
    mscale: Weight = 0.0
    mscale_all_dim: Weight = 0.0

    @property
    def magnitude(self) -> float:
        """What rotated queries and keys are multiplied by; `attention_factor` if it is given."""
        if self.attention_factor is not None:
            return self.attention_factor
        growth = 0.1 * max(0.0, math.log(self.factor))
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * growth + 1.0) / (self.mscale_all_dim * growth + 1.0)
        return growth + 1.0


class Divided(msgspec.Struct, frozen=True, tag="divided", tag_field="rope_type"):
    """Every frequency has a divisor of its own."""

    magnitude: ClassVar[float] = 1.0
    divisors: tuple[Amount, ...]

    @property
    def all_divisors(self) -> Mapping[str, Vector]:
        """As in `LinearScaling`."""
        return {DIVISORS: self.divisors}


class LongRope(msgspec.Struct, frozen=True, tag="longrope", tag_field="rope_type"):
    """Every frequency has a divisor for texts as long as those of training, and one for longer
    ones. An engine has the ones or the others, by the longest text that it takes: keys that are in
    the cache cannot be rotated anew."""

    short_factor: tuple[Amount, ...]
    long_factor: tuple[Amount, ...]
    original_max_position_embeddings: Annotated[float, msgspec.Meta(ge=2.0, le=1e9)]
    factor: Amount
    attention_factor: Amount | None = None

    @property
    def all_divisors(self) -> Mapping[str, Vector]:
        """As in `LinearScaling`."""
        return {"short_factor": self.short_factor, "long_factor": self.long_factor}

    @property
    def magnitude(self) -> float:
        """What rotated queries and keys are multiplied by; `attention_factor` if it is given."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1.0:
            return 1.0
        trained = self.original_max_position_embeddings
        return math.sqrt(1.0 + math.log(self.factor) / math.log(trained))


RopeScaling = LinearScaling | Llama3 | Yarn | Divided | LongRope
PUBLISHED: Final = ("linear", "llama3", "yarn", "longrope")
"""The rules that config.json may name."""


def scaling_from_hf(rope: Mapping[str, Any], max_positions: Any) -> RopeScaling | None:
    """Return the rule of `rope_scaling` or `rope_parameters` of config.json; None for no scaling.

    max_positions: the length of training, where the rule does not say it.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its old name
    if kind == "default":
        return None
    if kind not in PUBLISHED:
        raise unsupported_scaling(kind)
    said = {key: value for key, value in rope.items() if value is not None}
    rule = {"original_max_position_embeddings": max_positions, **said, "rope_type": kind}
    if kind == "longrope":
        rule.setdefault(
            "factor", _quotient(max_positions, rule["original_max_position_embeddings"])
        )
    return _convert(rule)


def _quotient(longest: Any, trained: Any) -> float:
    numbers = all(
        isinstance(x, int | float) and not isinstance(x, bool) for x in (longest, trained)
    )
    return longest / trained if numbers and trained else 0.0


class GGUFScaling(msgspec.Struct):
    """The metadata that describes a rule. Each key has the architecture's name as its prefix."""

    kind: str = msgspec.field(name="rope.scaling.type", default="linear")
    factor: float | None = msgspec.field(name="rope.scaling.factor", default=None)
    old_factor: float | None = msgspec.field(name="rope.scale_linear", default=None)
    trained: int | None = msgspec.field(name="rope.scaling.original_context_length", default=None)
    attention: float = msgspec.field(name="rope.scaling.attn_factor", default=1.0)
    yarn_attention: float = msgspec.field(name="rope.scaling.yarn_attn_factor", default=1.0)
    beta_fast: float = msgspec.field(name="rope.scaling.yarn_beta_fast", default=32.0)
    beta_slow: float = msgspec.field(name="rope.scaling.yarn_beta_slow", default=1.0)
    extrapolation: float = msgspec.field(name="rope.scaling.yarn_ext_factor", default=1.0)
    log_multiplier: float = msgspec.field(name="rope.scaling.yarn_log_multiplier", default=0.0)


def scaling_from_gguf(
    keys: GGUFScaling, max_positions: int, vectors: Mapping[str, Vector], *, truncates: bool
) -> RopeScaling | None:
    """Return the rule of a GGUF file; None for no scaling.

    max_positions: the length of training, where the rule does not say it.
    vectors: the values of those of `ROPE_VECTORS` that the file has.
    truncates: as in `Yarn`.
    """
    divisors = vectors.get(DIVISORS)
    if SHORT in vectors or LONG in vectors:
        return _long_rope(keys, max_positions, vectors)
    factor = (keys.factor or keys.old_factor or 1.0) if keys.kind != "none" else 1.0
    if keys.kind not in ("none", "linear", "yarn"):
        raise unsupported_scaling(keys.kind)
    if divisors is not None:
        if keys.kind == "yarn" or factor != 1.0:
            raise unsupported_scaling(f"{keys.kind} beside the tensor {DIVISORS}")
        return _convert({"rope_type": "divided", "divisors": divisors})
    if keys.kind != "yarn":
        return None if factor == 1.0 else _convert({"rope_type": "linear", "factor": factor})
    if keys.extrapolation != 1.0 or keys.log_multiplier != 0.0:
        raise unsupported_scaling("yarn with yarn_ext_factor or yarn_log_multiplier")
    rule: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.trained or max_positions,
        "beta_fast": keys.beta_fast,
        "beta_slow": keys.beta_slow,
        "truncate": truncates,
    }
    stated = _convert(rule).magnitude * keys.attention * keys.yarn_attention
    return _convert({**rule, "attention_factor": stated})


def _long_rope(keys: GGUFScaling, max_positions: int, vectors: Mapping[str, Vector]) -> RopeScaling:
    if vectors.keys() != {SHORT, LONG} or keys.kind not in ("linear", "none", "longrope"):
        raise unsupported_scaling(f"{keys.kind} beside the tensors {', '.join(sorted(vectors))}")
    return _convert(
        {
            "rope_type": "longrope",
            "short_factor": vectors[SHORT],
            "long_factor": vectors[LONG],
            "original_max_position_embeddings": keys.trained or max_positions,
            "factor": 1.0,
            "attention_factor": keys.attention,
        }
    )


def _convert(rule: Mapping[str, Any]) -> RopeScaling:
    try:
        converted: RopeScaling = msgspec.convert(rule, RopeScaling)
    except msgspec.ValidationError as exc:
        raise InvalidRequestError(f"model configuration: RoPE: {exc}", param="model") from exc
    return converted


def unsupported_scaling(kind: Any) -> InvalidRequestError:
    """Return the error of a rule that is not known, or cannot be had together with others."""
    return InvalidRequestError(
        f"model not supported: RoPE scaling {kind!r}, not one of {', '.join(PUBLISHED)}",
        param="model",
    )
