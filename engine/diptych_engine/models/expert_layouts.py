"""Splits experts that a file stores in one tensor into a tensor each.

Published safetensors store every expert by itself (`experts.3.up_proj.weight`). Newer versions of
transformers can save them as they are in memory (`experts.gate_up_proj`, `experts.down_proj`: all
experts of a layer, the gate above the up projection), and GGUF files stack them likewise, with the
gate separate. Only shapes are read here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from diptych_engine.models.floats import Floats
from diptych_engine.models.interface import WeightSlot
from diptych_frontend.model_files.model_source import GGUFTensor
from diptych_kernels.native.tile_layout import GROUP

STACKED: Final = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)")
"""A stacked tensor's name, without `.weight`."""
EXPERTS_RANK: Final = 3
"""[experts, out, in]."""
BYTES: Final = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2}
"""Sizes of numbers of more than one byte, by safetensors' names."""
PACKABLE: Final = ("BF16", "F16")


@dataclass(slots=True, frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, or a part of one; see `loader.Stored`."""

    path: Path
    file: Any
    """The same, opened by `safe_open`."""
    name: str
    index: Any = ...
    """What selects the part."""

    @property
    def recipe(self) -> object:
        return self.path.name, self.name, self.index

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(torch.empty(self.whole_shape, device="meta")[self.index].shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BYTES.get(self.dtype, 1)

    @property
    def dtype(self) -> str:
        """Safetensors' name of the type."""
        return str(self.file.get_slice(self.name).get_dtype())

    @property
    def is_packable(self) -> bool:
        shape = self.shape
        return self.dtype in PACKABLE and len(shape) == 2 and shape[1] % GROUP == 0

    def part(self) -> Floats | None:
        return Floats(self.values()) if self.is_packable else None

    def values(self) -> Tensor:
        found: Tensor = self.file.get_slice(self.name)[self.index]
        return found


def separate_stored(
    stored: Mapping[str, StoredTensor], slots: Mapping[str, WeightSlot]
) -> dict[str, StoredTensor]:
    """Return a table of tensors by name, with one for each expert. A tensor that fits no slot stays
    as it is, and the loader refuses it by name."""
    separate: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        found = STACKED.fullmatch(name)
        slot = None if found is None else slots.get(f"{found[1]}.0.up_proj.weight")
        shape = () if slot is None else tensor.whole_shape
        if found is None or slot is None or len(shape) != EXPERTS_RANK:
            separate[name] = tensor
            continue
        prefix, kind = found.groups()
        inner = slot.shape[0]
        for expert in range(shape[0]):
            if kind == "gate_up_proj":
                gate, up = (expert, slice(None, inner)), (expert, slice(inner, None))
                separate[f"{prefix}.{expert}.gate_proj.weight"] = replace(tensor, index=gate)
                separate[f"{prefix}.{expert}.up_proj.weight"] = replace(tensor, index=up)
            else:
                separate[f"{prefix}.{expert}.{kind}.weight"] = replace(tensor, index=expert)
    return separate


def separate_gguf(tensors: Mapping[str, GGUFTensor]) -> dict[str, GGUFTensor]:
    """Do the same for the tensors of a GGUF file, by their published names."""
    separate: dict[str, GGUFTensor] = {}
    for name, tensor in tensors.items():
        found = STACKED.fullmatch(name.removesuffix(".weight"))
        if found is None or len(tensor.shape) != EXPERTS_RANK:
            separate[name] = tensor
            continue
        experts, *shape = tensor.shape
        nbytes = tensor.nbytes // experts
        for expert in range(experts):
            separate[f"{found[1]}.{expert}.{found[2]}.weight"] = replace(
                tensor, shape=tuple(shape), offset=tensor.offset + expert * nbytes, nbytes=nbytes
            )
    return separate
