"""How the matrices of a folder of safetensors are quantised: `quantization_config` of config.json.

What engines cannot read is refused here, by its name, before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from diptych_protocol import InvalidRequestError

Method = Literal["fp8", "awq", "gptq", "compressed-tensors"]
REMEDY: Final = (
    "take the model's unquantised files, with weightPacking q4 or q8 to make them small, or a GGUF "
    "file"
)
CT_FORMATS: Final = {
    "float-quantized": ("float", (8,)),
    "naive-quantized": ("float", (8,)),
    "int-quantized": ("int", (8,)),
    "pack-quantized": ("int", (4, 8)),
}
"""Formats of compressed-tensors: the type and the bits of their numbers."""
GPTQ_ZEROS: Final = {"gptq": 1, "gptq_v2": 0}
"""`checkpoint_format` of GPTQ: what was taken from its zero points."""


Side = Annotated[int, msgspec.Meta(ge=32, le=1 << 16, multiple_of=32)]
Block = tuple[Side, Side]


class Quantization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How quantised matrices of a model are stored. Others may be beside them, as floats."""

    method: Method
    bits: int = 8
    """The size of a number in int32 words that hold several."""
    zero_shift: int = 0
    """What is added to a stored zero point."""
    block: tuple[int, int] = (128, 128)
    """Rows and columns that share a scale, where scales are in blocks."""
    group: int = 0
    """Columns that share a scale, where scales are in groups; -1: all of a row, 0: not said."""
    needs: str = ""
    """How the name of a tensor ends without which numbers would be taken for others."""


class _Fp8(msgspec.Struct):
    fmt: str = "e4m3"
    weight_block_size: Block | None = None


class _Awq(msgspec.Struct):
    bits: int
    zero_point: bool = True
    version: str = "gemm"
    group_size: int | None = None


class _Gptq(msgspec.Struct):
    bits: int
    checkpoint_format: str = "gptq"
    is_marlin_format: bool = False
    group_size: int | None = None
    desc_act: bool | None = None
    """Whether groups are in the order of activations."""
    dynamic: dict[str, dict[str, Any]] | None = None
    """Other settings for some of the matrices; those after "-:" are left out."""


class _CtWeights(msgspec.Struct):
    num_bits: int = 8
    type: str = "int"
    block_structure: Block | None = None
    group_size: int | None = None
    symmetric: bool = True


class _CtGroup(msgspec.Struct):
    weights: _CtWeights | None = None
    format: str | None = None


class _Ct(msgspec.Struct):
    config_groups: dict[str, _CtGroup]
    format: str = ""
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None
    """Rotations, some of which the products' inputs need, too."""


def quantization_from_hf(raw: Mapping[str, Any]) -> Quantization | None:
    """Return what config.json says; None if nothing is quantised.

    Raises `InvalidRequestError` for a way of quantising that no engine reads.
    """
    method = method_of(raw)
    if method in ("", "mxfp4"):  # of gpt-oss, whose tensors' names show what is packed
        return None
    if method not in _READERS:
        raise _refused(f"quant_method is {method!r}, not one of {', '.join(_READERS)}")
    try:
        return _READERS[method](_said(raw) or {})
    except msgspec.ValidationError as exc:
        raise _refused(str(exc)) from exc


def method_of(raw: Mapping[str, Any]) -> str:
    """Return the `quant_method` of config.json; empty if nothing is quantised."""
    found = _said(raw)
    return "" if found is None else str(found.get("quant_method"))


def _said(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    found = raw.get("quantization_config") or raw.get("compression_config")
    if found is not None and not isinstance(found, dict):
        raise _refused("it is not an object")
    return found


def _fp8(found: dict[str, Any]) -> Quantization:
    config = msgspec.convert(found, _Fp8)
    _require("fmt", config.fmt, ("e4m3",))
    return Quantization("fp8", block=config.weight_block_size or (128, 128))


def _awq(found: dict[str, Any]) -> Quantization:
    config = msgspec.convert(found, _Awq)
    _require("bits", config.bits, (4,))
    _require("version", config.version.lower(), ("gemm",))
    _require("zero_point", config.zero_point, (True,))
    return Quantization("awq", 4, group=config.group_size or 0)


def _gptq(found: dict[str, Any]) -> Quantization:
    config = msgspec.convert(found, _Gptq)
    _require("bits", config.bits, (4, 8))
    _require("is_marlin_format", config.is_marlin_format, (False,))
    _require("checkpoint_format", config.checkpoint_format, tuple(GPTQ_ZEROS))
    dynamic = config.dynamic or {}
    others = {pattern: own for pattern, own in dynamic.items() if not pattern.startswith("-:")}
    for pattern, own in others.items():
        _require(f"bits of dynamic[{pattern!r}]", own.get("bits", config.bits), (config.bits,))
    zero_shift = GPTQ_ZEROS[config.checkpoint_format]
    # Where they differ, groups and their order are read from the tensors.
    group = 0 if any("group_size" in own for own in others.values()) else config.group_size or 0
    ordered = config.desc_act and all(own.get("desc_act", True) for own in others.values())
    needs = "g_idx" if ordered else ""
    return Quantization("gptq", config.bits, zero_shift, group=group, needs=needs)


def _compressed(found: dict[str, Any]) -> Quantization | None:
    config = msgspec.convert(found, _Ct)
    sparsity = (config.sparsity_config or {}).get("format", "dense")
    _require("sparsity_config.format", sparsity, ("dense",))
    if (config.transform_config or {}).get("config_groups"):
        raise _refused("transform_config rotates weights and inputs")
    kinds, blocks, groups, symmetries = set(), set(), set(), set()
    for group in config.config_groups.values():
        if group.weights is None:
            continue
        own = group.format or config.format
        _require("format", own, tuple(CT_FORMATS))
        kind, sizes = CT_FORMATS[own]
        _require(f"type of {own} weights", group.weights.type, (kind,))
        _require(f"num_bits of {own} weights", group.weights.num_bits, sizes)
        kinds.add((own, group.weights.num_bits))
        blocks.add(group.weights.block_structure or (128, 128))
        groups.add(group.weights.group_size or 0)
        symmetries.add(group.weights.symmetric)
    packed = {bits for own, bits in kinds if own == "pack-quantized"} or {8}
    if len(packed) > 1 or len(blocks) > 1:
        raise _refused("config_groups have several sizes of packed weights, or of blocks")
    if not kinds:
        return None
    group_size = groups.pop() if len(groups) == 1 else 0
    needs = "weight_zero_point" if symmetries == {False} else ""
    return Quantization("compressed-tensors", packed.pop(), 0, blocks.pop(), group_size, needs)


_READERS: Final = {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}


def _require(field: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        names = " or ".join(str(each) for each in known)
        raise _refused(f"{field} is {value!r}, not {names}")


def _refused(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"model not supported: quantization_config of config.json: {what}; {REMEDY}", param="model"
    )
