"""Reads the header of a GGUF file: metadata and the tensor table.

Every process of a service opens the model at its start. The `gguf` package's reader wraps each of a
vocabulary's 100 000 strings in NumPy views, which takes seconds. This reader takes tens of
milliseconds, so nothing is cached on disk. The `gguf` package de-quantises.

Layout (little-endian): "GGUF", u32 version, u64 tensors, u64 pairs, then the pairs
(string key, u32 type, value), then the tensor infos (string name, u32 rank, u64 sizes with the
fastest-varying first, u32 ggml type, u64 offset from the end of the header, rounded up).
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from diptych_protocol.model_uri import parts_of

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
STRING: Final = 8
ARRAY: Final = 9
SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
                  12: "d"}  # fmt: skip
"""Value type -> `struct` format."""
MAX_RANK: Final = 8
MAX_HEADER_BYTES: Final = 256 << 20
"""The most bytes of metadata and tensor table; a vocabulary of a million entries takes less."""
MAX_VALUES: Final = 8 << 20
"""The most elements of all arrays, pairs and tensors: each takes more memory than in the file."""
DEFAULT_ALIGNMENT: Final = 32
FLOAT32: Final = 0
"""The type of a tensor that is not quantised."""
MAX_FLOATS: Final = 1 << 16
NO_WEIGHTS: Final = {"Q1_0", "Q8_1", "Q8_K", "F64", "I8", "I16", "I32", "I64"}
"""Types that nothing here reads: most are of intermediate results and of indices."""


class GGUFError(ValueError):
    """The file is not a GGUF file that can be read; the message says why."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The position of one tensor in the file."""

    path: Path
    """The file: one of several, if the model is split."""
    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """In torch's order: the last dimension is contiguous."""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A row of the tensor table as the file has it."""

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    path: Path
    metadata: dict[str, Any]
    """Key -> str, int, float, bool, or a list of them."""
    raw_tensors: list[RawTensor]
    file: os.stat_result
    """The file that was read."""

    @property
    def is_current(self) -> bool:
        """Whether the file is still the same."""
        return _identity(self.path.stat()) == _identity(self.file)

    def tensors(self) -> dict[str, GGUFTensor]:
        """Return the tensor table by name. Raises `GGUFError` for a tensor beyond the file."""
        # Imported late: it brings NumPy, which a front-end has no other use for.
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        table: dict[str, GGUFTensor] = {}
        for raw in self.raw_tensors:
            try:
                ggml_type = GGMLQuantizationType(raw.ggml_type)
            except ValueError:
                raise _unreadable(raw.name, str(raw.ggml_type)) from None
            if ggml_type.name in NO_WEIGHTS:
                raise _unreadable(raw.name, ggml_type.name)
            block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
            elements = 1
            for size in raw.shape:
                elements *= size
            if not raw.shape or raw.shape[-1] % block_elements:
                raise GGUFError(f"tensor {raw.name}: shape {raw.shape} does not fit {ggml_type!r}")
            nbytes = elements // block_elements * block_bytes
            _require_within(raw, nbytes, self.file.st_size)
            table[raw.name] = GGUFTensor(
                self.path, raw.name, ggml_type, raw.shape, raw.offset, nbytes
            )
        ordered = sorted(table.values(), key=lambda tensor: tensor.offset)
        for before, after in itertools.pairwise(ordered):
            if before.offset + before.nbytes > after.offset:
                raise GGUFError(
                    f"tensor {after.name} begins at byte {after.offset}, inside {before.name}, "
                    f"which ends at byte {before.offset + before.nbytes}"
                )
        return table


def _identity(file: os.stat_result) -> tuple[int, ...]:
    return file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns


def _unreadable(name: str, kind: str) -> GGUFError:
    return GGUFError(
        f"tensor {name} has the type {kind}, which is not read; the types of Q4_K_M, Q5_K_M, Q6_K, "
        "Q8_0, F16 and BF16 files are"
    )


def _require_within(raw: RawTensor, nbytes: int, file_size: int) -> None:
    if raw.offset + nbytes > file_size:
        raise GGUFError(
            f"tensor {raw.name} ends after the file does, at byte {raw.offset + nbytes} of "
            f"{file_size}: it is truncated"
        )


def read_header(path: Path) -> GGUFHeader:
    """Parse the header of the file. Raises `GGUFError` if it is damaged, `OSError` if unreadable.

    Every count is checked against the file's size and our own limits before it is used.
    """
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise GGUFError("it does not start with 'GGUF'")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Cursor(data).header(path, os.fstat(file.fileno()))
            except struct.error:
                raise GGUFError("it ends inside its header") from None
            except UnicodeDecodeError:
                raise GGUFError("a string in its header is not UTF-8") from None


def read_parts(path: Path) -> list[GGUFHeader]:
    """Parse the headers of a model's files: one, or several named `X-00001-of-0000N.gguf`, of which
    `path` is the first. Raises as `read_header`; the error names a missing part."""
    first = read_header(path)
    count, names = first.metadata.get("split.count", 1) or 1, parts_of(path.name)
    if count != len(names):
        raise GGUFError(
            f"it is one of {count} files; name the first, and it X-00001-of-{count:05}.gguf"
            if isinstance(count, int)
            else f"split.count is {count!r}"
        )
    headers = [first]
    for number, name in enumerate(names[1:], start=1):
        part = path.with_name(name)
        if not part.is_file():
            raise GGUFError(f"its part {name} is missing beside it")
        header = read_header(part)
        if (header.metadata.get("split.no"), header.metadata.get("split.count")) != (number, count):
            raise GGUFError(f"{name} is not its part {number + 1} of {count}")
        headers.append(header)
    found = [raw.name for header in headers for raw in header.raw_tensors]
    expected = first.metadata.get("split.tensors.count", len(found))
    if not len(found) == len(set(found)) == expected:
        raise GGUFError(f"its parts have {len(set(found))} different tensors, not {expected}")
    return headers


def read_floats(path: Path, raw: RawTensor) -> tuple[float, ...]:
    """Return the values of a small float32 vector. Raises `GGUFError` for anything else."""
    if raw.ggml_type != FLOAT32 or len(raw.shape) != 1 or raw.shape[0] > MAX_FLOATS:
        raise GGUFError(f"tensor {raw.name} is no vector of at most {MAX_FLOATS} float32")
    size = 4 * raw.shape[0]
    _require_within(raw, size, path.stat().st_size)
    with path.open("rb") as file:
        file.seek(raw.offset)
        return struct.unpack(f"<{raw.shape[0]}f", file.read(size))


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._end = min(len(data), MAX_HEADER_BYTES)
        self._at = len(MAGIC)
        self._values_left = MAX_VALUES

    def header(self, path: Path, file: os.stat_result) -> GGUFHeader:
        version = self._number("I")
        if version not in VERSIONS:
            raise GGUFError(f"version {version} is not one of {VERSIONS}")
        num_tensors, num_pairs = self._number("Q"), self._number("Q")
        self._count(num_tensors + num_pairs)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        rows = [self._tensor_row() for _ in range(num_tensors)]
        start = self._align(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        return GGUFHeader(
            path,
            metadata,
            [RawTensor(row.name, row.ggml_type, row.shape, start + row.offset) for row in rows],
            file,
        )

    def _number(self, fmt: str) -> Any:
        unpacker = struct.Struct("<" + fmt)
        (value,) = unpacker.unpack_from(self._data, self._at)
        self._at += unpacker.size
        return value

    def _string(self) -> str:
        length = self._number("Q")
        self._require(length)
        begin = self._at
        self._at += length
        return self._data[begin : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        if kind not in SCALARS:
            raise GGUFError(f"unknown value type {kind}")
        return self._number(SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        self._count(count)
        if kind == STRING:
            return self._string_array(count)
        if kind not in SCALARS:
            raise GGUFError(f"unknown array element type {kind}")
        self._require(struct.calcsize("<" + SCALARS[kind]) * count)
        unpacker = struct.Struct(f"<{count}{SCALARS[kind]}")
        values = unpacker.unpack_from(self._data, self._at)
        self._at += unpacker.size
        return list(values)

    def _string_array(self, count: int) -> list[str]:
        # Vocabularies come this way: 100 000 strings, so the cursor stays in local variables.
        data, at, length_at = self._data, self._at, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            end = at + 8 + length_at(data, at)[0]
            if end > self._end:
                raise GGUFError("it ends inside its header")
            strings.append(data[at + 8 : end].decode())
            at = end
        self._at = at
        return strings

    def _tensor_row(self) -> RawTensor:
        name, rank = self._string(), self._number("I")
        if rank > MAX_RANK:
            raise GGUFError(f"tensor {name} has {rank} dimensions")
        shape = tuple(self._number("Q") for _ in range(rank))
        return RawTensor(name, self._number("I"), shape[::-1], self._number("Q"))

    def _align(self, alignment: Any) -> int:
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise GGUFError(f"alignment {alignment!r} is not a power of two")
        return (self._at + alignment - 1) & -alignment

    def _count(self, values: int) -> None:
        self._values_left -= values
        if self._values_left < 0:
            raise GGUFError(f"its header has more than {MAX_VALUES} values")

    def _require(self, nbytes: int) -> None:
        if nbytes > self._end - self._at:
            raise GGUFError("it ends inside its header")
