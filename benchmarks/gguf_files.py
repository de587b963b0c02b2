"""GGUF files whose matrices have the types that llama.cpp's quantiser gives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from diptych_frontend.model_files.gguf_header import GGUFTensor, read_header

Quantise = Callable[[NDArray[np.float32], Kind], NDArray[np.uint8]]
"""[rows, columns] -> [rows, bytes]."""
FALLBACK: Final = {
    Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0, Kind.IQ4_XS: Kind.IQ4_NL,
}  # fmt: skip
"""What llama.cpp's quantiser takes for rows that are no multiple of 256."""


def mixture(base: Kind, layers: int) -> Callable[[str], Kind]:
    """The type of each matrix by its name in what llama.cpp calls M: more bits for some layers'
    values and down projections, and for the output matrix."""
    eighth = layers // 8

    def kind_of(name: str) -> Kind:
        if not name.startswith("blk."):
            return Kind.Q6_K
        layer = int(name.split(".")[1])
        more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        return Kind.Q6_K if more and ("attn_v" in name or "ffn_down" in name) else base

    return kind_of


def fitting(kind: Kind, columns: int) -> Kind:
    """A type for rows of so many columns."""
    return FALLBACK[kind] if columns % gguf.GGML_QUANT_SIZES[kind][0] else kind


def requantised(
    model: Path, target: Path, kind_of: Callable[[str], Kind], quantise: Quantise
) -> str:
    """Write a GGUF file's matrices anew, each as `kind_of` says for its name, where its rows allow
    it; not those that choose experts. Returns the new file's path."""
    header = read_header(model)
    writer = gguf.GGUFWriter(target, header.metadata["general.architecture"])
    for key, value in header.metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key != "general.architecture":
            writer.add_key_value(key, value, _type_of(value))
    raw = np.memmap(model, dtype=np.uint8, mode="r")
    for name, tensor in header.tensors().items():
        values, rows = _values_of(raw, tensor), tensor.shape[:-1]
        is_matrix = rows and name.endswith(".weight") and "ffn_gate_inp" not in name
        kind = fitting(kind_of(name), tensor.shape[-1]) if is_matrix else Kind.F32
        if kind in (Kind.F32, Kind.F16, Kind.BF16):
            data = gguf.quants.quantize(values, kind)
        else:
            data = quantise(values.reshape(-1, tensor.shape[-1]), kind).reshape(*rows, -1)
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)
    return str(target)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _values_of(raw: NDArray[np.uint8], tensor: GGUFTensor) -> NDArray[np.float32]:
    rows = raw[tensor.offset :][: tensor.nbytes].reshape(*tensor.shape[:-1], -1)
    values: NDArray[np.float32] = gguf.quants.dequantize(rows, tensor.type)
    return values


def _type_of(value: Any) -> gguf.GGUFValueType:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return gguf.GGUFValueType.UINT32 if is_number else gguf.GGUFValueType.get_type(value)
