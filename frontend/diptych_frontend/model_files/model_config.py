"""The shape of a decoder model, read from GGUF metadata or from Hugging Face's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

from diptych_frontend.model_files.families import FAMILIES, GGUF_ARCHITECTURES
from diptych_frontend.model_files.family_spec import FamilySpec
from diptych_frontend.model_files.layer_kinds import (
    GGUFLayerKeys,
    layers_from_gguf,
    layers_from_hf,
    rope_from_hf,
    rope_theta,
)
from diptych_frontend.model_files.layer_kinds import unsupported as _unsupported
from diptych_frontend.model_files.quantization import Quantization
from diptych_frontend.model_files.rope_scaling import (
    GGUFScaling,
    RopeScaling,
    Yarn,
    scaling_from_gguf,
    scaling_from_hf,
)
from diptych_frontend.model_files.vision_config import VisionConfig, vision_from_hf
from diptych_protocol import UNREADABLE, InvalidRequestError
from diptych_protocol.errors import converted

T = TypeVar("T")

ACTIVATIONS: Final = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "clamped": "silu"}
"""`hidden_act` of config.json for each of the gates."""
MAX_EXPERTS: Final = 1 << 12
MAX_SIZE: Final = 1 << 24
"""More than any dimension of a real model, so that a damaged file cannot request huge memory."""


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One decoder-only transformer, under Hugging Face's names."""

    architecture: str
    """A key of `FAMILIES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """The q, k and v projections add a bias (Qwen2)."""
    qk_norm: bool = False
    """Every head's q and k are RMS-normalised before RoPE (Qwen3)."""
    sliding_window: int | None = None
    """A token sees this many positions, including itself; None: all (Mistral 7B v0.1 has one)."""
    full_layers: tuple[int, ...] = ()
    """Layers whose tokens see everything in spite of `sliding_window`."""
    window_rope_theta: float | None = None
    """The base of RoPE, without scaling, in layers with a window; None: as in all others."""
    rotary_dim: int = 0
    """The first dimensions of each head, which RoPE rotates; 0: all."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers without RoPE."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """What attention and MLP yield is multiplied by before it is added."""
    attention_scale: float | None = None
    """What products of queries and keys are multiplied by; None: 1 / sqrt(head_dim)."""
    logits_divisor: float = 1.0
    attention_softcap: float = 0.0
    """Scores of attention become cap tanh(score / cap); 0: they stay as they are."""
    logits_softcap: float = 0.0
    """Likewise for logits."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    vision: VisionConfig | None = None
    """None for a model that takes text only."""
    num_experts: int = 0
    """The number of experts in each mixture layer; 0: there are none."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    """`intermediate_size` of one expert."""
    norm_topk_prob: bool = False
    """The weights of a token's experts add up to one."""
    decoder_sparse_step: int = 1
    """Every how many layers there is a mixture: 2 makes layers 1, 3, 5... mixtures."""
    mlp_only_layers: tuple[int, ...] = ()
    """Layers that are not mixtures all the same."""
    quantization: Quantization | None = None
    """How a folder of safetensors stores its matrices; None: as floats."""

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        sparse = self.num_experts > 0 and layer not in self.mlp_only_layers
        return sparse and (layer + 1) % self.decoder_sparse_step == 0

    def window_of(self, layer: int) -> int | None:
        """How many positions a token sees in a layer; None: all."""
        return None if layer in self.full_layers else self.sliding_window

    def check(self) -> None:
        """Raise `InvalidRequestError` unless the numbers describe a model that can be built."""
        sizes = (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
        )  # fmt: skip
        for field in sizes:
            if not 1 <= getattr(self, field) <= MAX_SIZE:
                raise _unsupported(f"{field} is {getattr(self, field)}")
        self._check_experts(family_of(self.architecture))
        if self.num_attention_heads % self.num_key_value_heads:
            raise _unsupported(
                f"{self.num_attention_heads} heads cannot share "
                f"{self.num_key_value_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise _unsupported(f"head_dim is {self.head_dim}; RoPE needs an even one")
        if self.rotated % 2 or not 0 < self.rotated <= self.head_dim:
            raise _unsupported(f"RoPE of {self.rotated} of {self.head_dim} dimensions of a head")
        if not (0 < self.rms_norm_eps < math.inf and 0 < self.rope_theta < math.inf):
            raise _unsupported("rms_norm_eps and rope_theta must be positive and finite")
        self._check_rope_scaling()
        self._check_scales()
        if self.sliding_window is not None and self.sliding_window < 1:
            raise _unsupported(f"sliding_window is {self.sliding_window}")
        outside = [t for t in self.eos_token_ids if not 0 <= t < self.vocab_size]
        if outside:
            raise _unsupported(f"eos_token_ids {outside} lie outside the vocabulary")
        if self.vision is not None:
            fault = self.vision.fault()
            if fault is not None:
                raise _unsupported(fault)
            if not 0 <= self.vision.image_token_id < self.vocab_size:
                raise _unsupported(f"image_token_id {self.vision.image_token_id}")

    @property
    def rotated(self) -> int:
        """The number of a head's dimensions that are rotated."""
        return self.rotary_dim or self.head_dim

    def _check_scales(self) -> None:
        for field in ("embedding_scale", "residual_scale", "attention_scale", "logits_divisor",
                      "window_rope_theta"):  # fmt: skip
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise _unsupported(f"{field} is {value}")
        for field in ("attention_softcap", "logits_softcap"):
            if not 0 <= getattr(self, field) < math.inf:
                raise _unsupported(f"{field} is {getattr(self, field)}")

    def _check_rope_scaling(self) -> None:
        scaling = self.rope_scaling
        if isinstance(scaling, Yarn) and self.rope_theta <= 1.0:
            raise _unsupported(f"rope_theta is {self.rope_theta}; YaRN needs more than 1")
        for name, divisors in {} if scaling is None else scaling.all_divisors.items():
            if 2 * len(divisors) != self.rotated:
                raise _unsupported(f"{name} has {len(divisors)} values, not {self.rotated // 2}")

    def _check_experts(self, family: FamilySpec) -> None:
        if not self.num_experts:
            return
        if not family.has_experts:
            raise _unsupported(f"num_experts in {self.architecture}")
        for field, most in (
            ("num_experts", MAX_EXPERTS),
            ("num_experts_per_tok", self.num_experts),
            ("moe_intermediate_size", MAX_SIZE),
            ("decoder_sparse_step", MAX_SIZE),
        ):
            if not 1 <= getattr(self, field) <= most:
                raise _unsupported(f"{field} is {getattr(self, field)}, not 1 to {most}")


DUMMY_DEFAULTS: Final[dict[str, Any]] = {
    "architecture": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


class DummySizes(msgspec.Struct):
    hidden_size: int
    num_attention_heads: int


def config_from_query(query: Mapping[str, str]) -> ModelConfig:
    """Return a dummy model's configuration: tiny defaults, each of which the query may override.

    Tuples are comma-separated lists, `rope_scaling` a JSON object.
    `head_dim` follows from hidden_size and num_attention_heads unless it is given.
    """
    fields: dict[str, Any] = {**DUMMY_DEFAULTS, **query}
    for name in ("eos_token_ids", "mlp_only_layers", "full_layers", "unrotated_layers"):
        if name in query:
            fields[name] = [part for part in query[name].split(",") if part]
    if "rope_scaling" in query:
        fields["rope_scaling"] = scaling_from_hf(
            _json_object(query["rope_scaling"]), fields["max_position_embeddings"]
        )
    if "head_dim" not in query:
        sizes = _convert(fields, DummySizes, strict=False)
        fields["head_dim"] = _head_dim(sizes.hidden_size, sizes.num_attention_heads)
    return _checked(_convert(fields, ModelConfig, strict=False))


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except UNREADABLE as exc:
        raise InvalidRequestError(f"model configuration: {exc}", param="model") from exc


class GGUFKeys(msgspec.Struct):
    """The metadata of the decoder. Each key begins with the architecture's name."""

    hidden_size: int = msgspec.field(name="embedding_length")
    intermediate_size: int = msgspec.field(name="feed_forward_length")
    num_hidden_layers: int = msgspec.field(name="block_count")
    num_attention_heads: int = msgspec.field(name="attention.head_count")
    max_position_embeddings: int = msgspec.field(name="context_length")
    num_key_value_heads: int | list[int] | None = msgspec.field(
        name="attention.head_count_kv", default=None
    )
    """The number of every layer, or a list of all layers' numbers."""
    head_dim: int | None = msgspec.field(name="attention.key_length", default=None)
    rope_dim: int | None = msgspec.field(name="rope.dimension_count", default=None)
    rope_theta: float = msgspec.field(name="rope.freq_base", default=10000.0)
    rms_norm_eps: float = msgspec.field(name="attention.layer_norm_rms_epsilon", default=1e-5)
    sliding_window: int | None = msgspec.field(name="attention.sliding_window", default=None)
    vocab_size: int | None = None
    num_experts: int = msgspec.field(name="expert_count", default=0)
    num_experts_per_tok: int = msgspec.field(name="expert_used_count", default=0)
    moe_intermediate_size: int = msgspec.field(name="expert_feed_forward_length", default=0)


class GGUFVocabularyKeys(msgspec.Struct):
    tokens: list[str] = msgspec.field(name="tokenizer.ggml.tokens", default_factory=list)
    bos: int | None = msgspec.field(name="tokenizer.ggml.bos_token_id", default=None)
    eos: int | None = msgspec.field(name="tokenizer.ggml.eos_token_id", default=None)
    eot: int | None = msgspec.field(name="tokenizer.ggml.eot_token_id", default=None)


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensor_names: set[str],
    rope_vectors: Mapping[str, tuple[float, ...]] = MappingProxyType({}),
) -> ModelConfig:
    """Return a configuration from GGUF metadata (`llama.block_count` and the like).

    Tensors supply what the metadata leaves out: without an output matrix in `tensor_names` the
    embeddings are tied, and `rope_vectors` are the file's values of `ROPE_VECTORS`.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in GGUF_ARCHITECTURES:
        known = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise _unsupported(f"a GGUF file of architecture {name!r}, not one of {known}")
    family = FAMILIES[GGUF_ARCHITECTURES[name]]
    prefix = f"{name}."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    keys = _convert(own, GGUFKeys)
    vocabulary = _convert(metadata, GGUFVocabularyKeys)
    head_dim = keys.head_dim or _head_dim(keys.hidden_size, keys.num_attention_heads)
    layers = layers_from_gguf(
        _convert(own, GGUFLayerKeys), family, keys.num_hidden_layers, keys.hidden_size
    )
    named = [vocabulary.tokens.index(x) for x in family.gguf_ends if x in vocabulary.tokens]
    kv_heads = keys.num_key_value_heads or keys.num_attention_heads
    if isinstance(kv_heads, list):
        if len(set(kv_heads)) > 1:
            raise _unsupported(
                f"layers of {' and '.join(map(str, sorted(set(kv_heads))))} key-value heads"
            )
        kv_heads = kv_heads[0]
    ends = dict.fromkeys(t for t in (vocabulary.eos, vocabulary.eot, *named) if t is not None)
    other: dict[str, Any] = {
        "architecture": family.architecture,
        "vocab_size": keys.vocab_size or len(vocabulary.tokens),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rope_scaling": scaling_from_gguf(
            _convert(own, GGUFScaling),
            keys.max_position_embeddings,
            rope_vectors,
            truncates=family.gguf_yarn_truncates,
        ),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "attention_bias": family.attention_bias,
        "qk_norm": family.qk_norm,
        "sliding_window": keys.sliding_window or None,
        "rotary_dim": 0 if keys.rope_dim in (None, head_dim) else keys.rope_dim,
        "bos_token_id": vocabulary.bos,
        "eos_token_ids": tuple(ends),
        "norm_topk_prob": keys.num_experts > 0,  # the format has no key for it
    }
    return _checked(ModelConfig(**_same_names(keys) | other | layers))


class HFConfig(msgspec.Struct):
    """The part of config.json that is used; other keys are ignored."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    """Gemma's name for it."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    """The name of `num_experts` in newer files."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


class HFGenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def config_from_hf(
    raw: Mapping[str, Any], generation: Mapping[str, Any], processor: Mapping[str, Any]
) -> ModelConfig:
    """Return a configuration from config.json, generation_config.json and preprocessor_config.json.
    The latter two are empty if the model has none."""
    family = family_of(raw.get("model_type"))
    vision = _vision(raw, processor) if family.sees else None
    for key, meaning in family.config_needs.items():
        if raw.get(key) is None:
            raise _unsupported(f"{family.architecture} without {key}: {meaning}")
    raw = {**family.config_defaults, **(_decoder_of(raw) if family.sees else raw)}
    raw |= {key: raw[own] for key, own in family.config_keys.items() if own in raw}
    config = _convert(raw, HFConfig)
    _require_plain(config, family)
    ends = _convert(generation, HFGenerationConfig).eos_token_id
    if ends is None:
        ends = config.eos_token_id if config.eos_token_id is not None else []
    rope = rope_from_hf(raw)
    head_dim = config.head_dim or _head_dim(config.hidden_size, config.num_attention_heads)
    experts = config.num_experts if config.num_local_experts is None else config.num_local_experts
    other: dict[str, Any] = {
        "architecture": family.architecture,
        "num_key_value_heads": config.num_key_value_heads or config.num_attention_heads,
        "head_dim": head_dim,
        "rope_theta": rope_theta(rope, config.rope_theta),
        "rope_scaling": scaling_from_hf(rope, config.max_position_embeddings),
        "attention_bias": family.attention_bias,
        "qk_norm": family.qk_norm,
        "sliding_window": config.sliding_window if family.uses_window else None,
        "eos_token_ids": tuple(ends) if isinstance(ends, list) else (ends,),
        "vision": vision,
        "num_experts": experts or 0,
        "mlp_only_layers": tuple(config.mlp_only_layers or ()),
    }
    layers = layers_from_hf(raw, family, config.num_hidden_layers, head_dim, config.hidden_size)
    return _checked(ModelConfig(**_same_names(config) | other | layers))


def _vision(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> VisionConfig:
    try:
        return vision_from_hf(raw, processor)
    except msgspec.ValidationError as exc:
        raise InvalidRequestError(f"model configuration: {exc}", param="model") from exc
    except ValueError as exc:
        raise _unsupported(str(exc)) from exc


def _decoder_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's part of the config.json of a model that sees."""
    text = raw.get("text_config")
    if not isinstance(text, dict) or text.get("model_type", "llama") != "llama":
        raise _unsupported("a model that sees whose text_config is not of model_type llama")
    whole = {key: raw[key] for key in ("bos_token_id", "eos_token_id") if raw.get(key) is not None}
    tied = {"tie_word_embeddings": raw.get("tie_word_embeddings", False)}
    return (
        {"rms_norm_eps": 1e-5, "bos_token_id": None}
        | text
        | whole
        | tied
        | {"model_type": raw["model_type"]}
    )


def _same_names(keys: GGUFKeys | HFConfig) -> dict[str, Any]:
    """What `ModelConfig` calls as these keys do."""
    names = set(keys.__struct_fields__).intersection(ModelConfig.__struct_fields__)
    return {name: getattr(keys, name) for name in names}


def _require_plain(config: HFConfig, family: FamilySpec) -> None:
    """Refuse variants of a known family whose arithmetic differs from what is built."""
    activation = config.hidden_activation or config.hidden_act or ACTIVATIONS[family.gate]
    if activation != ACTIVATIONS[family.gate]:
        raise _unsupported(f"hidden_act {activation!r} in {config.model_type}")
    if config.mlp_bias:
        raise _unsupported("mlp_bias")
    may_differ = config.attention_bias or "attention_bias" in family.config_defaults
    if may_differ and config.attention_bias != family.attention_bias:
        said = str(config.attention_bias).lower()
        raise _unsupported(f"attention_bias {said} in {config.model_type}")
    if config.use_sliding_window and not family.uses_window:
        raise _unsupported(f"use_sliding_window in {config.model_type}")


def family_of(architecture: Any) -> FamilySpec:
    """Return the family of an architecture. Raises `InvalidRequestError` if there is none."""
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise _unsupported(f"architecture {architecture!r}, not one of {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def _head_dim(hidden_size: int, num_heads: int) -> int:
    if num_heads < 1:
        raise _unsupported(f"num_attention_heads is {num_heads}")
    return hidden_size // num_heads


def _convert(fields: Mapping[str, Any], kind: type[T], *, strict: bool = True) -> T:
    return converted(fields, kind, "model configuration", "model", strict=strict)


def _checked(config: ModelConfig) -> ModelConfig:
    config.check()
    return config
