"""Opens safetensors, and finds the model's own tensors in those that a file stores.

Some families store several side by side, and some name one otherwise (`FamilySpec.parts`).
Published safetensors store every expert by itself (`experts.3.up_proj.weight`); newer versions of
transformers can save them as they are in memory (`experts.gate_up_proj`, `experts.down_proj`: all
experts of a layer, the gate above the up projection), and GGUF files stack them likewise, with the
gate separate. gpt-oss stacks them too, but transposed, with gate and up projection in turns. To
divide them only shapes are read.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diptych_engine.models.groups import Floats
from diptych_engine.models.interface import WeightSlot
from diptych_frontend.model_files.family_spec import FamilySpec
from diptych_frontend.model_files.model_source import GGUFTensor
from diptych_frontend.model_files.ordinary import require_ordinary
from diptych_kernels.native.tile_layout import GROUP
from diptych_protocol import UNREADABLE, InvalidRequestError

MODULE: Final = re.compile(r"(.+\.layers\.\d+\.)(.+)\.(weight|bias)")
STACKED: Final = re.compile(
    r"(.+\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(_bias|\.bias|\.weight|)"
)
"""A tensor of all experts of a layer."""
ALL: Final = slice(None)
BYTES: Final = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2}
"""Sizes of numbers of more than one byte, by safetensors' names."""
PACKABLE: Final = ("BF16", "F16")
BLOCKS: Final = "_blocks"
SCALES: Final = "_scales"
E2M1: Final = [sign * value for sign in (1.0, -1.0) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
"""The values of 4 bits in MXFP4."""
MXFP4_RANK: Final = 4
"""[experts, out, groups, bytes]."""
HEADER_AT: Final = 8
"""Where the header of a file of safetensors begins, behind its size, in bytes."""
LONGEST_HEADER: Final = 100_000_000
"""The library reads none that has more bytes."""


@dataclass(slots=True, frozen=True)
class Piece:
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

    def shape_in(self, whole: Iterable[int]) -> tuple[int, ...]:
        """Return its shape in a stored one of this shape."""
        return tuple(self.of(torch.empty(tuple(whole), device="meta")).shape)


WHOLE: Final = Piece("")
Read = TypeVar("Read")


class ReadOnce:
    """What several pieces of a stored tensor are made of: kept from the first to the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._awaited: dict[object, int] = {}
        self._read: dict[object, Any] = {}

    def expect(self, key: object) -> None:
        """Count a piece that will want it."""
        self._awaited[key] = self._awaited.get(key, 0) + 1

    def get(self, key: object, read: Callable[[], Read]) -> Read:
        """Return what `read` does."""
        with self._lock:
            found: Read = self._read.pop(key) if key in self._read else read()
            self._awaited[key] = self._awaited.get(key, 0) - 1
            if self._awaited[key] > 0:
                self._read[key] = found
            return found


class Divisible(Protocol):
    """A stored tensor that may have several of the model's own in it."""

    @property
    def whole_shape(self) -> tuple[int, ...]: ...

    def at(self, piece: Piece) -> Self:
        """Return one of them."""


Divided = TypeVar("Divided", bound=Divisible)


@dataclass(slots=True, frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, or a part of one; see `loader.Stored`."""

    path: Path
    file: Any
    """The same, opened by `safe_open`."""
    name: str
    piece: Piece = WHOLE

    @property
    def recipe(self) -> object:
        return self.path.name, self.name, self.piece

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def shape(self) -> tuple[int, ...]:
        return self.piece.shape_in(self.whole_shape)

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

    def part(self) -> Floats | Tensor:
        return Floats(self.values()) if self.is_packable else self.values()

    def at(self, piece: Piece) -> Self:
        return replace(self, piece=piece)

    def values(self) -> Tensor:
        found: Tensor = self.file.get_slice(self.name)[self.piece.index or ...]
        return found.t().contiguous() if self.piece.transposed else found


@dataclass(slots=True, frozen=True)
class StoredMxfp4(StoredTensor):
    """Experts of gpt-oss in 4 bits: `name` with the ending `_blocks` has two values in each byte,
    and with `_scales` a power of two for 32 of them (OCP Microscaling Formats, 2023). As if it were
    [experts, in, out]."""

    scales: StoredTensor | None = None
    experts: ReadOnce = field(default_factory=ReadOnce)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        experts, rows, *columns = self.file.get_slice(f"{self.name}{BLOCKS}").get_shape()
        return experts, 2 * math.prod(columns), rows

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // 2

    @property
    def is_packable(self) -> bool:
        return False

    def at(self, piece: Piece) -> Self:
        self.experts.expect(piece.index[0])
        return replace(self, piece=piece)

    def values(self) -> Tensor:
        expert, *inside = self.piece.index
        dense = self.experts.get(expert, lambda: self._dense(expert))
        return Piece(self.name, tuple(inside), self.piece.transposed).of(dense).contiguous()

    def _dense(self, expert: int | slice) -> Tensor:
        """[in, out] of one expert."""
        blocks = self.file.get_slice(f"{self.name}{BLOCKS}")[expert]
        powers = (self.scales or self).file.get_slice(f"{self.name}{SCALES}")[expert]
        pairs = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
        values = torch.tensor(E2M1)[pairs.int()]
        return torch.ldexp(values, powers.int()[..., None] - 127).flatten(1).t()


def open_safetensors(folder: Path, stack: ExitStack) -> dict[str, StoredTensor]:
    """Return every tensor of every shard; the names in the files are the index. Raises
    `InvalidRequestError` for a file that cannot be read."""
    stored: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            require_ordinary(path)
            shard: Any = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as exc:
            raise unusable(f"{path} cannot be read: {_truncation(path) or exc}") from exc
        for name in shard.keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
            stored[name] = StoredTensor(path, shard, name)
    return stored


class _Place(msgspec.Struct):
    """An entry of the header. One has no place: the metadata."""

    data_offsets: tuple[int, int] = (0, 0)


def _truncation(path: Path) -> str:
    """Say which tensor a file ends in; empty if that is not what is wrong with it."""
    try:
        require_ordinary(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            header = int.from_bytes(file.read(HEADER_AT), "little")
            if header > LONGEST_HEADER:
                return ""
            places = msgspec.json.decode(file.read(header), type=dict[str, _Place])
    except (OSError, *UNREADABLE):
        return ""
    ends = sorted((HEADER_AT + header + at.data_offsets[1], name) for name, at in places.items())
    for end, name in ends:
        if end > size:
            return (
                f"tensor {name} ends after the file does, at byte {end} of {size}: it is truncated"
            )
    return ""


def unusable(what: str) -> InvalidRequestError:
    """Return the error for files that do not hold the model of their configuration."""
    return InvalidRequestError(f"model weights: {what}; download the model again", param="model")


def pieces_of(
    name: str, shape: tuple[int, ...], slots: Mapping[str, WeightSlot], family: FamilySpec
) -> list[Piece]:
    """Return the model's own tensors in a stored one; none if it has no place in the model.

    shape: of the stored one. Their own shapes may be wrong, which the loader finds out.
    """
    module = MODULE.fullmatch(name)
    own = family.parts.get(module[2]) if module is not None else None
    if module is not None and own is not None:
        names = [f"{module[1]}{part}.{module[3]}" for part in own]
        return _rows(names, shape[0], slots) if shape and names[-1] in slots else []
    if name in slots:
        return [Piece(name)]
    stacked = STACKED.fullmatch(name)
    if stacked is None:
        return []
    experts, projection, ending = stacked.groups()
    kind = "bias" if "bias" in ending else "weight"
    first = slots.get(f"{experts}.0.up_proj.{kind}")
    if first is None or len(shape) != 1 + len(first.shape):
        return []
    return list(_of_experts(experts, projection, kind, shape[0], first.shape[0], family))


def _rows(names: list[str], rows: int, slots: Mapping[str, WeightSlot]) -> list[Piece]:
    """Tensors whose rows are stored one after the other; the last one gets the rest."""
    if len(names) == 1:
        return [Piece(names[0])]
    ends = list(accumulate(slots[name].shape[0] for name in names[:-1]))
    bounds = pairwise([0, *(min(end, rows) for end in ends), rows])
    return [Piece(name, (slice(*bound),)) for name, bound in zip(names, bounds, strict=True)]


def _of_experts(
    experts: str, projection: str, kind: str, number: int, inner: int, family: FamilySpec
) -> Iterator[Piece]:
    transposed = family.transposes_experts and kind == "weight"
    halves = slice(None, inner), slice(inner, None)
    if family.transposes_experts:
        halves = slice(0, None, 2), slice(1, None, 2)
    for expert in range(number):
        prefix = f"{experts}.{expert}."
        if projection != "gate_up_proj":
            yield Piece(f"{prefix}{projection}.{kind}", (expert,), transposed)
            continue
        for name, half in zip(("gate_proj", "up_proj"), halves, strict=True):
            index = (expert, ALL, half) if transposed else (expert, half)
            yield Piece(f"{prefix}{name}.{kind}", index, transposed)


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
    stored: Mapping[str, Divided], slots: Mapping[str, WeightSlot], family: FamilySpec
) -> dict[str, Divided]:
    """Return a table of tensors by the model's own names. A tensor that fits no slot stays as it
    is, and the loader refuses it by name."""
    separate: dict[str, Divided] = {}
    for name, tensor in stored.items():
        pieces = pieces_of(name, tensor.whole_shape, slots, family)
        for piece in pieces:
            separate[piece.name] = tensor.at(piece)
        if not pieces:
            separate[name] = tensor
    return separate


def joined(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """A table in which blocks and scales are one tensor."""
    whole: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        stem = name.removesuffix(BLOCKS)
        scales = stored.get(f"{stem}{SCALES}") if stem != name else None
        if scales is not None and len(tensor.whole_shape) == MXFP4_RANK:
            whole[stem] = StoredMxfp4(tensor.path, tensor.file, stem, scales=scales)
        elif not name.endswith(SCALES) or f"{name.removesuffix(SCALES)}{BLOCKS}" not in stored:
            whole[name] = tensor
    return whole


def separate_gguf(
    tensors: Mapping[str, GGUFTensor], slots: Mapping[str, WeightSlot], family: FamilySpec
) -> dict[str, GGUFTensor]:
    """Do the same for the tensors of a GGUF file, by their published names."""
    separate: dict[str, GGUFTensor] = {}
    for name, tensor in tensors.items():
        pieces = pieces_of(name, tensor.shape, slots, replace(family, transposes_experts=False))
        for piece in pieces:
            separate[piece.name] = _piece_of(tensor, piece)
        if not pieces:
            separate[name] = tensor
    return separate


def _piece_of(tensor: GGUFTensor, piece: Piece) -> GGUFTensor:
    """One of the slices along a tensor's first dimension, or several."""
    if not piece.index:
        return tensor
    rows, *others = tensor.shape
    [index] = piece.index
    start, count = (index, 1) if isinstance(index, int) else (index.start, index.stop - index.start)
    shape = tuple(others) if isinstance(index, int) else (count, *others)
    each = tensor.nbytes // rows
    return replace(tensor, shape=shape, offset=tensor.offset + start * each, nbytes=count * each)
