"""Folders of safetensors whose matrices are quantised, as the makers of each format write them.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Json = dict[str, Any]
Sizes = dict[str, tuple[int, int]]
Scheme = Callable[[int, int, torch.Generator], tuple[Tensors, Tensor]]
"""(outputs, inputs) -> a matrix's tensors by the ends of their names, and its values."""
SIZES: Json = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}  # fmt: skip
MODULES = {
    "self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128), "mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256),
}  # fmt: skip
FUSED = {
    "self_attn.qkv_proj": (256, 128), "self_attn.o_proj": (128, 128),
    "mlp.gate_up_proj": (512, 128), "mlp.down_proj": (128, 256),
}  # fmt: skip
"""Those of Phi-3."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers: Tensor, bits: int) -> Tensor:
    """[rows, n] -> [rows, n * bits / 32] int32, the first number in the lowest bits."""
    parts = numbers.long().view(len(numbers), -1, 32 // bits)
    return (parts << torch.arange(0, 32, bits)).sum(-1).to(torch.int32)


def numbers(high: int, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, high, shape, generator=generator)


def scales(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return (0.01 + 0.04 * torch.rand(shape, generator=generator)).half()


def awq(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
    q = numbers(16, (columns, rows), generator)
    z, s = numbers(16, (columns // 32, rows), generator), scales((columns // 32, rows), generator)
    order = torch.tensor(AWQ_ORDER)
    packed = [words(x.view(len(x), -1, 8)[..., order].flatten(1), 4) for x in (q, z)]
    values = (q - z.repeat_interleave(32, 0)) * s.float().repeat_interleave(32, 0)
    return {"qweight": packed[0], "qzeros": packed[1], "scales": s}, values.t()


def gptq(
    bits: int, *, is_symmetric: bool = True, shift: int = 1, sorts: bool = False, lowest: int = 6
) -> Scheme:
    def scheme(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        q, groups = numbers(1 << bits, (columns, rows), generator), columns // 64
        z = numbers(4 << (bits - 4), (groups, rows), generator) + (lowest << (bits - 4))
        if is_symmetric:
            z[:] = 1 << (bits - 1)
        s, group_of = scales((groups, rows), generator), torch.arange(columns) // 64
        if sorts:
            group_of = group_of[torch.randperm(columns, generator=generator)]
        values = (q - z[group_of]) * s.float()[group_of]
        tensors = {
            "qweight": words(q.t(), bits).t().contiguous(),
            "qzeros": words(z, bits) - sum(shift << bit for bit in range(0, 32, bits)),
            "scales": s,
            "g_idx": group_of.to(torch.int32),
        }
        return tensors, values.t()

    return scheme


def packed_ints(bits: int, *, has_zeros: bool = False) -> Scheme:
    def scheme(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        half = 1 << (bits - 1)
        q = numbers(2 * half, (rows, columns), generator) - half
        s = scales((rows, columns // 32), generator).bfloat16()
        z = numbers(half, (rows, columns // 32), generator) - half // 2
        tensors = {
            "weight_packed": words(q + half, bits),
            "weight_shape": torch.tensor([rows, columns]),
            "weight_scale": s,
        }
        if has_zeros:
            tensors["weight_zero_point"] = words((z + half).t(), bits).t().contiguous()
            q = q - z.repeat_interleave(32, 1)
        return tensors, q * s.float().repeat_interleave(32, 1)

    return scheme


def ints(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
    q = numbers(255, (rows, columns), generator) - 127
    s = scales((rows, 1), generator).bfloat16()
    unused = {"input_scale": torch.ones(1), "input_zero_point": torch.ones(1).char()}
    return {"weight": q.to(torch.int8), "weight_scale": s} | unused, q * s.float()


def ints_of_one_scale(
    rows: int, columns: int, generator: torch.Generator
) -> tuple[Tensors, Tensor]:
    q = numbers(100, (rows, columns), generator) - 50
    tensors = {"weight_scale": torch.tensor([0.01]), "weight_zero_point": torch.tensor([3])}
    stored = {end: each.bfloat16() for end, each in tensors.items()}
    stored["weight_zero_point"] = stored["weight_zero_point"].to(torch.int8)
    return {"weight": q.to(torch.int8)} | stored, (q - 3) * stored["weight_scale"].float()


def fp8(kind: str) -> Scheme:
    def scheme(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        q = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        if kind == "block":
            s = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) + 0.1
            whole = s.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            return {"weight": q, "weight_scale_inv": s}, q.float() * whole
        s = torch.rand(rows if kind == "row" else 1, 1, generator=generator) + 0.1
        stored = s if kind == "row" else s.reshape(())
        return {"weight": q, "weight_scale": stored}, q.float() * s

    return scheme


def compressed(form: str, **weights: Any) -> Json:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }  # fmt: skip


FP8, AWQ = {"quant_method": "fp8"}, {"quant_method": "awq", "bits": 4, "version": "GEMM"}
GPTQ: Json = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}
INT4 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
INT8 = compressed("int-quantized", num_bits=8, type="int", strategy="channel")
FLOAT8 = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
FORMATS: dict[str, tuple[Json, Scheme, int | None]] = {
    "fp8": (FP8, fp8("tensor"), 43),
    "fp8-blocks": (FP8 | {"weight_block_size": [128, 128]}, fp8("block"), 43),
    "float-quantized": (FLOAT8, fp8("row"), 43),
    "awq": (AWQ, awq, 8),
    "gptq-4": (GPTQ, gptq(4), 4),
    "gptq-4-zeros": (GPTQ, gptq(4, is_symmetric=False), 8),
    "gptq-4-zeros-of-0": (GPTQ, gptq(4, is_symmetric=False, lowest=0), 8),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, shift=0), 4),
    "gptq-8": (GPTQ | {"bits": 8}, gptq(8), 8),
    "gptq-sorted": (GPTQ | {"desc_act": True}, gptq(4, sorts=True), None),
    "int4": (INT4, packed_ints(4), 4),
    "int4-zeros": (INT4, packed_ints(4, has_zeros=True), 8),
    "int8-packed": (compressed("pack-quantized", num_bits=8, type="int"), packed_ints(8), 8),
    "int8": (INT8, ints, 8),
    "int8-tensor": (INT8, ints_of_one_scale, 8),
}
"""config.json's entry, the scheme, and the kind of tiles; None: floats."""


def save(
    folder: Path,
    config: Json,
    scheme: Scheme,
    modules: Sizes = MODULES,
    family: str = "llama",
    **sizes: int,
) -> tuple[str, Tensors]:
    """A checkpoint whose layer is quantised, and its values. Its heads have 64 numbers, since
    kernels for that size are there already."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    tokens = {name: torch.randn(64, 128, generator=generator).half() for name in ("embed", "head")}
    stored: Tensors = {
        "model.embed_tokens.weight": tokens["embed"],
        "lm_head.weight": tokens["head"],
        "model.norm.weight": torch.ones(128),
        "model.layers.0.input_layernorm.weight": torch.ones(128),
        "model.layers.0.post_attention_layernorm.weight": torch.ones(128),
    }
    values = {name: tensor.float() for name, tensor in stored.items()}
    for module, shape in modules.items():
        name = f"model.layers.0.{module}"
        tensors, values[f"{name}.weight"] = scheme(*shape, generator)
        stored |= {f"{name}.{end}": tensor.contiguous() for end, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    described = SIZES | sizes | {"model_type": family, "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(described))
    return str(folder), values
