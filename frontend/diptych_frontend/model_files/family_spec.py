"""What distinguishes one family of decoder models from another: data only, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from diptych_protocol import UNSAID, SamplingDefaults

GGUF_TENSORS: Final = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "blk.N.attn_norm": "model.layers.N.input_layernorm",
        "blk.N.attn_q": "model.layers.N.self_attn.q_proj",
        "blk.N.attn_k": "model.layers.N.self_attn.k_proj",
        "blk.N.attn_v": "model.layers.N.self_attn.v_proj",
        "blk.N.attn_q_norm": "model.layers.N.self_attn.q_norm",
        "blk.N.attn_k_norm": "model.layers.N.self_attn.k_norm",
        "blk.N.attn_output": "model.layers.N.self_attn.o_proj",
        "blk.N.ffn_norm": "model.layers.N.post_attention_layernorm",
        "blk.N.ffn_gate": "model.layers.N.mlp.gate_proj",
        "blk.N.ffn_up": "model.layers.N.mlp.up_proj",
        "blk.N.ffn_down": "model.layers.N.mlp.down_proj",
        "blk.N.ffn_gate_inp": "model.layers.N.mlp.gate",
        "blk.N.ffn_gate_exps": "model.layers.N.mlp.experts.gate_proj",
        "blk.N.ffn_up_exps": "model.layers.N.mlp.experts.up_proj",
        "blk.N.ffn_down_exps": "model.layers.N.mlp.experts.down_proj",
    }
)
"""A GGUF tensor's name -> Hugging Face's, both without `.weight` or `.bias`; N is the layer."""


Gate = Literal["silu", "gelu_tanh", "clamped"]


@dataclass(frozen=True, slots=True)
class FamilySpec:
    """One family: how its files are read, and which of the engine's models computes it."""

    architecture: str
    """`model_type` of config.json."""
    about: str
    """Its models, up to the first `:`, `;`, `,` or `. `, and how they differ from others."""
    model: str = "llama"
    """The model class, a key of `BUILDERS` in `engine/diptych_engine/models/registry.py`."""
    attention_bias: bool = False
    """The q, k and v projections add a bias."""
    output_bias: bool = False
    """The projection out of attention adds one."""
    attention_sinks: bool = False
    """Every head sees one more key, which has a score and no value."""
    expert_bias: bool = False
    """The router and the projections of experts add a bias."""
    qk_norm: bool = False
    """The q and k of every head are RMS-normalised before RoPE."""
    uses_window: bool = False
    """`sliding_window` of config.json limits what attention sees; else it is unused by this family,
    and `use_sliding_window` is refused."""
    window_period: int = 0
    """Every how many layers one sees everything, where the file does not say; 0: none does."""
    window_rope_theta: float | None = None
    """The base of RoPE, without scaling, in layers with a window; None: as in all others."""
    unrotated_period: int = 0
    """Every how many layers one has no RoPE, where the file does not say it; 0: all have it."""
    position_embedding_type: str | None = None
    """The only value of that key of config.json that is supported; None: there is no such key."""
    config_keys: Mapping[str, str] = field(default_factory=dict)
    """A key of config.json -> the one that has its value in this family."""
    config_needs: Mapping[str, str] = field(default_factory=dict)
    """A key of config.json -> what a file without it means, which is not supported."""
    config_defaults: Mapping[str, bool | float] = field(default_factory=dict)
    """Values of config.json where it leaves them out."""
    scales_embeddings: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""
    gate: Gate = "silu"
    """How an MLP combines gate and up projection: see `gated` in
    `engine/diptych_engine/models/linear.py`."""
    norms_after: bool = False
    """What attention and MLP yield is normalised before it is added."""
    norms_from_one: bool = False
    """Safetensors hold the weights of norms less one."""
    sees: bool = False
    """Whether it takes images: config.json has `text_config` and `vision_config`."""
    text_prefix: str = "model."
    """The prefix of the decoder's published tensor names, except `lm_head`."""
    has_experts: bool = False
    """Some layers are mixtures of experts, with the keys and tensors of Qwen3-MoE."""
    transposes_experts: bool = False
    """Safetensors stack experts as [experts, in, out], gate and up projection in turns."""
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """A published module of a layer -> the model's own modules that lie in its rows one after the
    other; where there is only one, it is just named otherwise."""
    gguf_architecture: str | None = ""
    """`general.architecture` of a GGUF file, if it differs; None: no files are of this family."""
    gguf_tensors: Mapping[str, str] = field(default_factory=lambda: GGUF_TENSORS)
    gguf_ends: tuple[str, ...] = ()
    """Tokens that end an answer, beside those of a GGUF file, which may only name a text's end."""
    gguf_yarn_truncates: bool = True
    """Whether YaRN's bounds are whole places, which GGUF files do not say."""
    gguf_finetuned_is_rope: bool = False
    """Whether `rope.scaling.finetuned` of a GGUF file says that there is RoPE at all."""
    gguf_attention_scales: Mapping[int, float] = field(default_factory=dict)
    """`attention_scale` of models with so many layers, which GGUF files do not say."""
    gguf_sampling: SamplingDefaults = UNSAID
    """How the makers sample from all their models of this architecture, for GGUF files that do not
    say it; unsaid where models differ, or their cards say nothing. The family's row has the
    source."""
    gguf_interleaves_pairs: bool = False
    """Whether GGUF files store the two rows of each rotated pair of query and key side by side
    instead of half a head apart."""
