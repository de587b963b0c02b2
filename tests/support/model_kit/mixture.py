"""A small mixture of experts with random weights: transformers' model, and its files.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import torch
import transformers  # its classes are imported when they are used
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def published_mixture(folder: Path, *, stacked: bool = False, **changes: Any) -> Any:
    """A `Qwen3MoeForCausalLM`, saved under `folder` as it is published, or with the experts of a
    layer stacked in one tensor."""
    torch.manual_seed(0)
    model: Any = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES | changes))
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder, save_original_format=not stacked)
    return model


def answer_of(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """What the model itself generates, greedily and past any end."""
    with torch.inference_mode():
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


def experts_of(model: Any, token_ids: list[int]) -> Tensor:
    """[tokens, layers, experts a token]: what the model's own router chooses; -1 in layers that
    have none."""
    with torch.inference_mode():
        given = model(torch.tensor([token_ids]), output_router_logits=True)
    config = model.config
    chosen = torch.full((len(token_ids), config.num_hidden_layers, config.num_experts_per_tok), -1)
    sparse = [i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    for index, logits in zip(sparse, given.router_logits, strict=True):
        chosen[:, index] = logits.softmax(-1).topk(config.num_experts_per_tok).indices
    return chosen


def save_mixture_gguf(path: Path, model: Any, matrices: Kind = Kind.F32) -> str:
    """The same model as llama.cpp's converter would write it; its path."""
    sizes = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, sizes.num_hidden_layers)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(sizes.num_hidden_layers)
    writer.add_context_length(sizes.max_position_embeddings)
    writer.add_embedding_length(sizes.hidden_size)
    writer.add_feed_forward_length(sizes.intermediate_size)
    writer.add_head_count(sizes.num_attention_heads)
    writer.add_head_count_kv(sizes.num_key_value_heads)
    writer.add_key_length(sizes.head_dim)
    writer.add_layer_norm_rms_eps(sizes.rms_norm_eps)
    writer.add_vocab_size(sizes.vocab_size)
    writer.add_expert_count(sizes.num_experts)
    writer.add_expert_used_count(sizes.num_experts_per_tok)
    writer.add_expert_feed_forward_length(sizes.moe_intermediate_size)
    for name, values in _of_converter(model):
        kind = Kind.F32 if "norm" in name or "mlp.gate." in name else matrices
        short = names.get_name(name, try_suffixes=(".weight",))
        assert short is not None, name
        writer.add_tensor(short, gguf.quants.quantize(values.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _of_converter(model: Any) -> list[tuple[str, Tensor]]:
    """The model's tensors, with the stacked gates apart from the stacked up projections."""
    tensors = []
    for name, values in model.state_dict().items():
        prefix, _, kind = name.partition(".experts.")
        if kind == "gate_up_proj":
            gate, up = values.chunk(2, 1)
            tensors.append((f"{prefix}.experts.gate_proj.weight", gate.contiguous()))
            tensors.append((f"{prefix}.experts.up_proj.weight", up.contiguous()))
        else:
            tensors.append((f"{name}.weight" if kind else name, values))
    return tensors
