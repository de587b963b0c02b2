"""Small GGUF files, quantised as a test wants them.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor

from diptych_frontend.model_files.gguf_header import read_header

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
HEAD_DIM: Final = 16
MODULES: Final[dict[str, tuple[int, int]]] = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
"""Module -> [out, in]."""


def quantised(name: str) -> Kind:
    """As in the model of the demo: the output matrix in 8 bits, the layers in 4."""
    if "norm" in name:
        return Kind.F32
    return Kind.Q8_0 if "embed" in name or "lm_head" in name else Kind.Q4_1


def random_tensors(seed: int = 0) -> dict[str, Tensor]:
    """By their Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return 0.2 * torch.randn(shape, generator=generator)

    tensors = {
        "model.embed_tokens.weight": randn(64, 64),
        "model.norm.weight": 1.0 + randn(64),
        "lm_head.weight": randn(64, 64),
    }
    for layer in range(SIZES["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for module, shape in MODULES.items():
            tensors[f"{prefix}{module}.weight"] = randn(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = 1.0 + randn(64)
    return tensors


def unquantised(name: str) -> Kind:
    """Every tensor as it is."""
    return Kind.F32


def save_gguf(
    path: Path,
    kind_of: Callable[[str], Kind] = quantised,
    add: Callable[[gguf.GGUFWriter], None] | None = None,
    tensors_a_file: int = 0,
) -> str:
    """A Llama model with random weights, as llama.cpp's converter would write it; its path.

    add: writes further metadata and tensors. tensors_a_file: more go into further files.
    """
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SIZES["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=tensors_a_file)
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(SIZES["vocab_size"])
    if add is not None:
        add(writer)
    for name, tensor in random_tensors().items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            halves = values.reshape(-1, 2, HEAD_DIM // 2, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        kind = kind_of(name)
        short = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert short is not None
        writer.add_tensor(short, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def save_lora(folder: Path, rank: int = 4, modules: Sequence[str] = tuple(MODULES)) -> str:
    """An adapter of some projections; its path."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(9)
    pairs = {
        f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight": 0.2
        * torch.randn(shape, generator=generator)
        for layer in range(SIZES["num_hidden_layers"])
        for module, (outputs, inputs) in MODULES.items()
        if module in modules
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank)))
    }
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(pairs, folder / "adapter_model.safetensors")
    return str(folder)


def first_layers(model: Path, count: int, path: Path) -> str:
    """Write a model of the first layers of a GGUF file, with all that the file says of text: a
    quick one, from which nobody expects words. Returns its path."""
    whole, kept, infos, offset = model.read_bytes(), [], b"", 0
    tensors = read_header(model).tensors().values()
    for tensor in tensors:
        _, layer, *_ = [*tensor.name.split("."), "-"]
        if not tensor.name.startswith("blk.") or int(layer) < count:
            dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
            infos += _text(tensor.name) + dims + struct.pack("<IQ", tensor.type, offset)
            data = whole[tensor.offset : tensor.offset + tensor.nbytes]
            kept.append(data + bytes(-len(data) % gguf.GGUF_DEFAULT_ALIGNMENT))
            offset += len(kept[-1])
    metadata = whole[16 : whole.index(_text(next(iter(tensors)).name))]
    layers = _text("llama.block_count") + struct.pack("<I", gguf.GGUFValueType.UINT32)
    at = metadata.index(layers) + len(layers)
    metadata = metadata[:at] + struct.pack("<I", count) + metadata[at + 4 :]
    head = whole[:8] + struct.pack("<Q", len(kept)) + metadata + infos
    path.write_bytes(head + bytes(-len(head) % gguf.GGUF_DEFAULT_ALIGNMENT) + b"".join(kept))
    return str(path)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
