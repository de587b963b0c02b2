"""Fills a model's weights from a GGUF file, from safetensors, or with random numbers.

Each tensor is read through a memory map, de-quantised, and copied straight into its place in the
model's fused tensors. Those that stay packed come from a file that all engines of a machine map.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.models.groups import Floats, Groups, has_groups, read_groups
from diptych_engine.models.interface import Packable, WeightSlot, share
from diptych_engine.models.packed import PackedMatrix, Part, packed_beside
from diptych_engine.models.packed_file import Matrices, places_for, shared_matrices
from diptych_engine.models.quantised_tensors import gather_quantised
from diptych_engine.models.registry import build_model
from diptych_engine.models.rounding import rounded
from diptych_engine.models.shard import Shard
from diptych_engine.models.stored_parts import (
    joined,
    open_safetensors,
    separate_gguf,
    separate_stored,
    unusable,
)
from diptych_frontend.model_files.family_spec import FamilySpec
from diptych_frontend.model_files.model_config import family_of
from diptych_frontend.model_files.model_source import GGUFTensor, ModelSource, readable
from diptych_frontend.model_files.rope_scaling import ROPE_VECTORS
from diptych_kernels.made_once import stamp_of
from diptych_kernels.packed_product import is_available
from diptych_kernels.trust import set_aside

log = logging.getLogger(__name__)

Names = tuple[str, ...]
"""Published tensors that are loaded at once."""
Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the total."""

PROGRESS_INTERVAL_S: Final = 5.0
LOADER_THREADS: Final = 2
SAMPLES: Final = 256
"""How many a file has."""
SAMPLE_BYTES: Final = 4096
DUMMY_SCALE: Final = 0.02
"""Standard deviation of random weights; norms are 1."""

GGUF_FLOATS: Final = {
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
GGUF_NAME: Final = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def load_weights(
    slots: Mapping[str, WeightSlot],
    source: ModelSource,
    seed: int = 0,
    on_progress: Progress | None = None,
    packables: Sequence[Packable] = (),
    bits: int | None = None,
) -> None:
    """Fill every slot, or pack it: one of the `packables`, if its source holds levels or small
    floats.

    seed: determines dummy weights. bits: what the file holds as floats is rounded to levels of so
    many bits first, for each of the `packables`.

    Raises `InvalidRequestError`, naming the tensor, if one is missing, superfluous, misshapen or
    of a type that cannot be read.
    """
    progress = on_progress or _ignore_progress
    if source.format == "dummy":
        _fill_randomly(slots, seed, progress, packables, bits)
        return
    with ExitStack() as stack:
        opened = _opened(slots, source, stack)
        _Load(opened, packables, bits, progress).run()


def weights_stamp(source: ModelSource, seed: int) -> bytes:
    """Return what changes with a model's weights, with their files, and with how they are read.
    Raises `InvalidRequestError` if a file is not there."""
    if source.path is None:
        return repr((source.uri, seed)).encode()
    with readable(source.path):
        files = _files_of(source, source.path)
        return stamp_of(files + sorted(Path(__file__).parent.glob("*.py")))


def weights_sample(source: ModelSource) -> str:
    """Return a digest of samples of a model's files, whose place others may have taken. It is the
    same on every machine. Empty for what stays as it is: dummies, packages, and what was fetched.
    Raises `InvalidRequestError` if a file is not there."""
    if source.path is None or source.uri.startswith("package://"):
        return ""
    if ".content" in source.path.resolve().parts:
        return ""
    digest = blake2b(digest_size=8)
    with readable(source.path):
        for path in _files_of(source, source.path):
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                for place in range(0, size, max(size // SAMPLES, SAMPLE_BYTES)):
                    file.seek(place)
                    digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _files_of(source: ModelSource, path: Path) -> list[Path]:
    if source.format == "gguf":
        return sorted({path, *(tensor.path for tensor in source.tensors().values())})
    return sorted({*path.glob("*.safetensors"), *path.glob("*.json")})


def check_weights(source: ModelSource, shard: Shard) -> None:
    """Raise the same as `load_weights`, as far as the headers of files tell. Nothing else is read,
    and nothing allocated."""
    if source.format != "dummy":
        planned = build_model(source.config, 1, torch.float32, torch.device("meta"), shard)
        with ExitStack() as stack:
            _opened(planned.slots, source, stack)


def is_quantised(source: ModelSource) -> bool:
    """Whether a file holds levels that stay packed, on processors that have the kernels."""
    if source.format != "gguf":
        return source.config.quantization is not None
    return has_groups((tensor.type, tensor.shape) for tensor in source.tensors().values())


def _ignore_progress(done: int, total: int) -> None:
    """Nobody asked."""


@dataclass(slots=True, frozen=True)
class _Opened:
    """A model's files, whose tensors have the names and shapes of its slots."""

    slots: Mapping[str, WeightSlot]
    table: Mapping[str, Stored]
    files: Sequence[Path]
    reorder: bool


def _opened(slots: Mapping[str, WeightSlot], source: ModelSource, stack: ExitStack) -> _Opened:
    """Open the files, until the stack closes."""
    if source.path is None:
        raise ValueError(f"{source.uri} has no path")
    family = family_of(source.config.architecture)
    if source.format == "gguf":
        opened = _opened_gguf(slots, source, family)
    else:
        opened = _opened_safetensors(slots, source, source.path, family, stack)
    _require_same_names(slots, opened.table)
    for name, tensor in opened.table.items():
        _require_shape(slots[name], tensor.shape, name)
    return opened


def _opened_gguf(
    slots: Mapping[str, WeightSlot], source: ModelSource, family: FamilySpec
) -> _Opened:
    named = {
        published_name(name, family): tensor
        for name, tensor in source.tensors().items()
        if name not in ROPE_VECTORS  # the configuration has their values
    }
    table = separate_gguf(named, slots, family)
    # The converter has added it already.
    slots = {name: replace(slot, added=0.0) for name, slot in slots.items()}
    files = {
        path: np.memmap(path, dtype=np.uint8, mode="r")
        for path in sorted({tensor.path for tensor in table.values()})
    }
    stored = {name: _FromGGUF(tensor, files[tensor.path]) for name, tensor in table.items()}
    return _Opened(slots, stored, list(files), reorder=not family.gguf_interleaves_pairs)


class Stored(Protocol):
    """A published tensor in a file."""

    @property
    def recipe(self) -> object:
        """Where it is, and what it is; its `repr` is the same in every process."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int:
        """Its size in the file."""

    @property
    def is_packable(self) -> bool:
        """Whether `part` may return something else than floats of any type."""

    def part(self) -> Part | Tensor:
        """Return what the file holds; its values if that cannot be packed."""


@dataclass(slots=True, frozen=True)
class _FromGGUF:
    recipe: GGUFTensor
    file: NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.recipe.shape

    @property
    def nbytes(self) -> int:
        return self.recipe.nbytes

    @property
    def is_packable(self) -> bool:
        is_float = self.recipe.type in GGUF_FLOATS and len(self.shape) == 2
        return is_float or has_groups([(self.recipe.type, self.shape)])

    @property
    def _raw(self) -> NDArray[np.uint8]:
        return self.file[self.recipe.offset : self.recipe.offset + self.nbytes]

    def part(self) -> Part | Tensor:
        dtype = GGUF_FLOATS.get(self.recipe.type)
        if dtype is not None and self.is_packable:
            return Floats(torch.from_numpy(np.array(self._raw)).view(dtype).view(self.shape))
        raw = self._raw
        groups = read_groups(raw, self.recipe.type, self.shape)
        if groups is not None:
            return groups
        values = dequantize(raw.reshape(*self.shape[:-1], -1), self.recipe.type)
        # Unquantised values still lie in the read-only map; torch wants memory it may write to.
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))


class _Load:
    """The way of the tensors of a file, or of several, into a model."""

    def __init__(
        self, opened: _Opened, packables: Sequence[Packable], bits: int | None, progress: Progress
    ) -> None:
        self._slots, self._table = opened.slots, opened.table
        self._files, self._reorder = opened.files, opened.reorder
        self._bits, self._jobs = bits, _jobs(self._table, packables)
        self._packable = [
            names
            for names, packable in self._jobs.items()
            if packable is not None and self._may_pack(names)
        ]
        self._filled: set[Names] = set()
        self._untold = {names: sum(self._table[x].nbytes for x in names) for names in self._jobs}
        self._progress, self._total, self._done = progress, sum(self._untold.values()), 0

    def run(self) -> None:
        # NumPy and torch let go of the interpreter while they compute, so threads help.
        with ThreadPoolExecutor(LOADER_THREADS) as pool:
            packed: Callable[[Names], PackedMatrix | None] = self._pack
            may_share = self._packable and self._on_cpu(self._packable[0])
            shared = self._shared(pool) if may_share else None
            if shared is not None:
                # Another process may have packed them, with kernels that this one does not trust.
                usable = {
                    name: own
                    for name, own in shared.items()
                    if is_available(None if own.rounds else own.tiles.dtype)
                }
                packed = lambda names: usable.get(names[0])  # noqa: E731
            for names in pool.map(lambda names: self._load(names, packed), self._jobs):
                self._tell(names)

    def _may_pack(self, names: Names) -> bool:
        """Whether tensors gain by it: those of 16 bits are no smaller for it on a GPU."""
        stored = [self._table[name] for name in names]
        if self._on_cpu(names):
            return is_available() and bool(self._bits or all(x.is_packable for x in stored))
        small = all(x.is_packable and x.nbytes < 2 * math.prod(x.shape) for x in stored)
        return bool(self._bits) or small

    def _on_cpu(self, names: Names) -> bool:
        return self._slots[names[0]].target.device.type == "cpu"

    def _shared(self, pool: ThreadPoolExecutor) -> Matrices | None:
        """All that can be packed, from the file that all engines of this machine map."""
        recipe = [
            (
                packable.least_bits,
                [(name, self._table[name].recipe, self._slots[name].order) for name in names],
            )
            for names in self._packable
            if (packable := self._jobs[names]) is not None
        ]

        def make() -> Iterator[tuple[str, PackedMatrix]]:
            for names, own in zip(
                self._packable, pool.map(self._pack, self._packable), strict=True
            ):
                self._tell(names)
                if own is not None:
                    yield names[0], own
            if any(name.startswith("float_") for name in set_aside()):
                raise RuntimeError("kernels were put aside, and others may trust theirs")

        num_bytes = sum(self._untold[names] for names in self._packable)
        for path, key in places_for(self._files, (self._reorder, self._bits, recipe)):
            found = shared_matrices(path, num_bytes, make, key)
            if found is not None:
                return found
        return None

    def _load(self, names: Names, packed: Callable[[Names], PackedMatrix | None]) -> Names:
        """Tensors that belong together: what becomes of one depends on all of them."""
        packable = self._jobs[names]
        own = packed(names) if names in self._packable else None
        if packable is not None and own is not None:
            packable.linear.pack(own)
        elif names not in self._filled:
            self._fill(names, (self._part(name, packable) for name in names))
        return names

    def _pack(self, names: Names) -> PackedMatrix | None:
        """A projection of these tensors; None if it cannot be packed: it is filled instead, because
        each byte is read once."""
        packable, packed = self._jobs[names], None
        parts = [self._part(name, packable) for name in names]
        shares = [
            share_of(part, self._slots[name], reorder=self._reorder)
            for name, part in zip(names, parts, strict=True)
            if not isinstance(part, Tensor)
        ]
        own = [each for each in shares if each is not None]
        if packable is not None and len(own) == len(names):
            packed = packed_beside(packable.linear.weight, own)
        if packed is None:
            self._fill(names, parts)
        return packed

    def _fill(self, names: Names, parts: Iterable[Part | Tensor]) -> None:
        packable = self._jobs[names]
        if packable is not None:
            packable.linear.unpack()
        for name, part in zip(names, parts, strict=True):
            fill(self._slots[name], _values(part), name, reorder=self._reorder)
        self._filled.add(names)

    def _part(self, name: str, packable: Packable | None) -> Part | Tensor:
        """What the file holds; or, where that is no levels, its values rounded if that was asked
        for."""
        part = self._table[name].part()
        if not self._bits or packable is None or isinstance(part, Groups):
            return part
        return rounded(_values(part), max(self._bits, packable.least_bits)) or part

    def _tell(self, names: Names) -> None:
        self._done += self._untold.pop(names, 0)
        self._progress(self._done, self._total)


def pack(packable: Packable, bits: int) -> None:
    """Pack a projection that is plain, rounded to levels of so many bits."""
    linear = packable.linear
    part = rounded(linear.weight.t(), max(bits, packable.least_bits))
    packed = None if part is None else packed_beside(linear.weight, [part])
    if packed is not None:
        linear.pack(packed)
    elif part is not None:
        linear.weight.copy_(part.values().t())


def _jobs(names: Iterable[str], packables: Sequence[Packable]) -> dict[Names, Packable | None]:
    """What is loaded at once, in the order of the file; with the projection that it might be."""
    owners = {name: packable for packable in packables for name in packable.published}
    jobs: dict[Names, Packable | None] = {}
    for name in names:
        if name in owners:
            jobs[owners[name].published] = owners[name]
        else:
            jobs[name,] = None
    return jobs


def published_name(name: str, family: FamilySpec) -> str:
    """Translate GGUF's name of a tensor to Hugging Face's; an unknown one stays as it is."""
    found = GGUF_NAME.fullmatch(name)
    if found is None:
        return name
    layer, part, kind = found.groups()
    general = part if layer is None else f"blk.N.{part}"
    whole = family.gguf_tensors.get(f"{general}.{kind}")
    known = family.gguf_tensors.get(general)
    if whole is None and known is None:
        return name
    return (whole or f"{known}.{kind}").replace(".N.", f".{layer}.")


def _values(part: Part | Tensor) -> Tensor:
    """Floats of any type."""
    if isinstance(part, Floats) and part.scale is None:
        return part.numbers
    return part if isinstance(part, Tensor) else part.values()


def _opened_safetensors(
    slots: Mapping[str, WeightSlot],
    source: ModelSource,
    folder: Path,
    family: FamilySpec,
    stack: ExitStack,
) -> _Opened:
    stored = joined(open_safetensors(folder, stack))
    quantization = source.config.quantization
    found = dict(gather_quantised(stored, quantization) if quantization else stored.items())
    table: dict[str, Stored] = {
        name: tensor
        for name, tensor in separate_stored(found, slots, family).items()
        if not is_redundant(name, slots)
    }
    files = sorted({tensor.path for tensor in stored.values()})
    return _Opened(slots, table, files, reorder=True)


def is_redundant(name: str, slots: Mapping[str, WeightSlot]) -> bool:
    """Whether a published tensor adds nothing: some files repeat the embedding as the head, and old
    ones contain a constant."""
    repeated = name == "lm_head.weight" and name not in slots
    return repeated or name.endswith("rotary_emb.inv_freq")


def _fill_randomly(
    slots: Mapping[str, WeightSlot],
    seed: int,
    progress: Progress,
    packables: Sequence[Packable],
    bits: int | None,
) -> None:
    owners = {name: packable for packable in packables for name in packable.published}
    total = sum(slot.target.nbytes for slot in slots.values())
    generator = torch.Generator().manual_seed(seed)
    done = 0
    for name, slot in slots.items():
        own = owners.get(name)
        if own is not None:
            own.linear.unpack()
        if "norm" in name:
            slot.target.fill_(1.0)
        else:
            values = torch.randn(slot.shape, generator=generator)
            slot.target.copy_(slot.share_of(values).mul_(DUMMY_SCALE))
        if own is not None and bits and name == own.published[-1]:
            pack(own, bits)
        done += slot.target.nbytes
        progress(done, total)


def fill(
    slot: WeightSlot,
    values: Tensor,
    name: str,
    *,
    reorder: bool,
    packable: Packable | None = None,
    bits: int | None = None,
) -> None:
    """Copy a published tensor to its place. Raises `InvalidRequestError` for the wrong shape.

    reorder: rotated pairs are half a head apart in `values`.
    packable: the projection that the place is a part of. If that is packed, so are the new rows, as
    its own are; if it is plain, they are rounded to levels of so many `bits`. Others stay as they
    are.
    """
    _require_shape(slot, values.shape, name)
    values = slot.share_of(values)
    if reorder:
        values = interleave_pairs(values, slot)
    if packable is None:
        slot.target.copy_(values.float() + slot.added if slot.added else values)
        return
    linear = packable.linear
    is_fused = slot.target.stride() == linear.weight.stride()
    rows = values.t() if is_fused else values
    if linear.packed is not None:
        weight, target = linear.weight, slot.target
        start = (target.storage_offset() - weight.storage_offset()) // weight.stride(1)
        packed = linear.packed.with_rows(start, rows)
        if packed is not None:
            linear.pack(packed)
            return
        linear.unpack()
    part = rounded(rows, max(bits, packable.least_bits)) if bits else None
    rows = rows if part is None else part.values()
    slot.target.copy_(rows.t() if is_fused else rows)


def _require_shape(slot: WeightSlot, shape: tuple[int, ...], name: str) -> None:
    if shape != slot.shape:
        raise unusable(
            f"tensor {name} has the shape {list(shape)}, "
            f"not {list(slot.shape)} as the configuration says"
        )


def share_of(part: Part, slot: WeightSlot, *, reorder: bool) -> Part | None:
    """Do the same as `fill` with a part; None if this rank's share divides some of its groups."""
    if slot.columns is not None:
        return part.columns(slot.columns.start, slot.columns.length)
    if slot.rows is None and not (reorder and slot.rotary_dim):
        return part
    order = share(torch.arange(slot.shape[0]), 0, slot.rows)
    return part.rows(interleave_pairs(order, slot) if reorder else order)


def interleave_pairs(rows: Tensor, slot: WeightSlot) -> Tensor:
    """Reorder rows whose rotated pairs are half a head apart, so that the pairs are side by
    side."""
    if not slot.rotary_dim:
        return rows
    heads = rows.reshape(-1, slot.rotary_dim, *rows.shape[1:])
    rotated = slot.rotated or slot.rotary_dim
    halves = heads[:, :rotated].reshape(-1, 2, rotated // 2, *rows.shape[1:])
    pairs = halves.transpose(1, 2).reshape(-1, rotated, *rows.shape[1:])
    return torch.cat([pairs, heads[:, rotated:]], 1).reshape(rows.shape)


def _require_same_names(slots: Mapping[str, WeightSlot], names: Iterable[str]) -> None:
    found = set(names)
    missing, superfluous = sorted(slots.keys() - found), sorted(found - slots.keys())
    if missing:
        raise unusable(f"tensor {missing[0]} is missing ({len(missing)} in all)")
    if superfluous:
        raise unusable(
            f"tensor {superfluous[0]} has no place in this architecture ({len(superfluous)} in all)"
        )


def log_progress(uri: str) -> Callable[[int, int], None]:
    """Return a callback that logs it every few seconds."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_INTERVAL_S:
            last = now
            log.info("loading %s: %d of %d MB", uri, done // 1_000_000, total // 1_000_000)

    return report
