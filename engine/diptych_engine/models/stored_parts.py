"""Finds the model's own tensors in those that a file stores.

Some families store several side by side, and some name one otherwise (`FamilySpec.parts`).
Published safetensors store every expert by itself (`experts.3.up_proj.weight`); newer versions of
transformers can save them as they are in memory (`experts.gate_up_proj`, `experts.down_proj`: all
experts of a layer, the gate above the up projection), and GGUF files stack them likewise, with the
gate separate. gpt-oss stacks them too, but transposed, with gate and up projection in turns. Only
shapes are read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Final

from torch import Tensor

from diptych_engine.models.interface import WeightSlot
from diptych_frontend.model_files.family_spec import FamilySpec
from diptych_frontend.model_files.model_source import GGUFTensor

MODULE: Final = re.compile(r"(.+\.layers\.\d+\.)(.+)\.(weight|bias)")
STACKED: Final = re.compile(
    r"(.+\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(_bias|\.bias|\.weight|)"
)
"""A tensor of all experts of a layer."""
ALL: Final = slice(None)


@dataclass(slots=True, frozen=True)
class Part:
    """One of the model's own tensors in a stored one."""

    name: str
    """A key of the model's slots."""
    index: tuple[int | slice, ...] = ()
    """What selects it."""
    transposed: bool = False

    def of(self, stored: Tensor) -> Tensor:
        """Return its values."""
        values = stored[self.index]
        return values.t() if self.transposed else values


@dataclass(slots=True, frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, or a part of one."""

    file: Any
    """An open `safe_open`."""
    name: str
    part: Part | None = None

    def read(self) -> Tensor:
        part = self.part or Part(self.name)
        values: Tensor = self.file.get_slice(self.name)[part.index or ...]
        return values.t() if part.transposed else values

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())


def parts_of(
    name: str, shape: tuple[int, ...], slots: Mapping[str, WeightSlot], family: FamilySpec
) -> list[Part]:
    """Return the model's own tensors in a stored one; none if it has no place in the model.

    shape: of the stored one. Their own shapes may be wrong, which the loader finds out.
    """
    module = MODULE.fullmatch(name)
    own = family.parts.get(module[2]) if module is not None else None
    if module is not None and own is not None:
        names = [f"{module[1]}{part}.{module[3]}" for part in own]
        return _rows(names, shape[0], slots) if shape and names[-1] in slots else []
    if name in slots:
        return [Part(name)]
    stacked = STACKED.fullmatch(name)
    if stacked is None:
        return []
    experts, projection, ending = stacked.groups()
    kind = "bias" if "bias" in ending else "weight"
    first = slots.get(f"{experts}.0.up_proj.{kind}")
    if first is None or len(shape) != 1 + len(first.shape):
        return []
    return list(_of_experts(experts, projection, kind, shape[0], first.shape[0], family))


def _rows(names: list[str], rows: int, slots: Mapping[str, WeightSlot]) -> list[Part]:
    """Tensors whose rows are stored one after the other; the last one gets the rest."""
    if len(names) == 1:
        return [Part(names[0])]
    ends = list(accumulate(slots[name].shape[0] for name in names[:-1]))
    bounds = pairwise([0, *(min(end, rows) for end in ends), rows])
    return [Part(name, (slice(*bound),)) for name, bound in zip(names, bounds, strict=True)]


def _of_experts(
    experts: str, projection: str, kind: str, number: int, inner: int, family: FamilySpec
) -> Iterator[Part]:
    transposed = family.transposes_experts and kind == "weight"
    halves = slice(None, inner), slice(inner, None)
    if family.transposes_experts:
        halves = slice(0, None, 2), slice(1, None, 2)
    for expert in range(number):
        prefix = f"{experts}.{expert}."
        if projection != "gate_up_proj":
            yield Part(f"{prefix}{projection}.{kind}", (expert,), transposed)
            continue
        for name, half in zip(("gate_proj", "up_proj"), halves, strict=True):
            index = (expert, ALL, half) if transposed else (expert, half)
            yield Part(f"{prefix}{name}.{kind}", index, transposed)


def published_names(slots: Iterable[str], family: FamilySpec) -> list[str]:
    """Return the names under which the family's files store the model's own tensors, each once."""
    stored = {own: name for name, parts in family.parts.items() for own in parts}
    names: dict[str, None] = {}
    for own in slots:
        module = MODULE.fullmatch(own)
        if module is not None:
            names[f"{module[1]}{stored.get(module[2], module[2])}.{module[3]}"] = None
        else:
            names[own] = None
    return list(names)


def separate_stored(
    stored: Mapping[str, StoredTensor], slots: Mapping[str, WeightSlot], family: FamilySpec
) -> dict[str, StoredTensor]:
    """Return a table of tensors by the model's own names. A tensor that fits no slot stays as it
    is, and the loader refuses it by name."""
    separate: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        parts = parts_of(name, tensor.whole_shape, slots, family)
        for part in parts:
            separate[part.name] = replace(tensor, part=part)
        if not parts:
            separate[name] = tensor
    return separate


def separate_gguf(
    tensors: Mapping[str, GGUFTensor], slots: Mapping[str, WeightSlot], family: FamilySpec
) -> dict[str, GGUFTensor]:
    """Do the same for the tensors of a GGUF file, by their published names."""
    separate: dict[str, GGUFTensor] = {}
    for name, tensor in tensors.items():
        parts = parts_of(name, tensor.shape, slots, replace(family, transposes_experts=False))
        for part in parts:
            separate[part.name] = _part_of(tensor, part)
        if not parts:
            separate[name] = tensor
    return separate


def _part_of(tensor: GGUFTensor, part: Part) -> GGUFTensor:
    """One of the slices along a tensor's first dimension, or several."""
    if not part.index:
        return tensor
    rows, *others = tensor.shape
    [index] = part.index
    start, count = (index, 1) if isinstance(index, int) else (index.start, index.stop - index.start)
    shape = tuple(others) if isinstance(index, int) else (count, *others)
    each = tensor.nbytes // rows
    return replace(tensor, shape=shape, offset=tensor.offset + start * each, nbytes=count * each)
