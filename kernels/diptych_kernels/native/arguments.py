"""The arguments of each kernel for CPUs, declared once for its callers and for the compiled code.

All are int64. An address is a number, strides and sizes of memory are in bytes, other lengths in
elements, and a float32 is its bits (`kernel.bits_of`). A kernel takes the address of one record.
"""

from __future__ import annotations

import ctypes
from typing import TypeVar, dataclass_transform

import numpy as np


@dataclass_transform(eq_default=False)
class Arguments(ctypes.Structure):
    """The base of all. `record` turns the annotations of each class into fields."""


Kind = TypeVar("Kind", bound=type[Arguments])


def record(kind: Kind) -> Kind:
    """Lay out the annotations of a class in memory, one int64 after the other."""
    kind._fields_ = [(name, ctypes.c_int64) for name in kind.__annotations__]
    return kind


@record
class RmsNorm(Arguments):
    x: int
    x_stride: int
    weight: int
    out: int
    rows: int
    size: int
    eps: int


@record
class SiluMul(Arguments):
    gate_up: int
    out: int
    rows: int
    size: int


@record
class RopeKvWrite(Arguments):
    heads: int
    rotations: int
    cache: int
    blocks: int
    offsets: int
    bias: int
    """0 if the model has none; likewise for both norms."""
    query_norm: int
    key_norm: int
    eps: int
    tokens: int
    num_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    block_stride: int
    item: int
    """Size, in bytes, of a number in the cache."""


@record
class DecodeAttention(Arguments):
    queries: int
    query_stride: int
    cache: int
    block_stride: int
    attended: int
    item: int
    sinks: int
    """0 if the model has none; likewise for the soft cap."""
    softcap: int
    num_decodes: int
    heads: int
    kv_heads: int
    block_size: int
    table_width: int
    lengths: int
    first_keys: int
    tables: int
    partitions: int
    partials: int
    scratch: int
    scratch_bytes: int
    """The size for each thread."""
    head_dim: int


@record
class ChunkAttention(Arguments):
    queries: int
    query_stride: int
    cache: int
    block_stride: int
    attended: int
    item: int
    sinks: int
    """0 if the model has none; likewise for the soft cap."""
    softcap: int
    tokens: int
    heads: int
    kv_heads: int
    block_size: int
    blocks: int
    length: int
    """Tokens of the context, the new ones included."""
    window: int
    begin: int
    """The first key that is read, rounded down to a partition."""
    keys: int
    num_keys: int
    scratch: int
    scratch_bytes: int
    """The size for each thread."""


@record
class PackedProduct(Arguments):
    x: int
    x_stride: int
    rows: int
    groups: int
    tiles: int
    num_tiles: int
    out: int
    out_stride: int
    add: int
    """1: add to what `out` holds."""
    inputs: int
    factors: int


@record
class PackedRows(Arguments):
    rows: int
    num_rows: int
    groups: int
    tiles: int
    num_tiles: int
    out: int


@record
class AmxProduct(Arguments):
    x: int
    x_stride: int
    first: int
    end: int
    groups: int
    tiles: int
    num_tiles: int
    out: int
    out_stride: int
    add: int
    inputs: int
    memory: int


@record
class Table(Arguments):
    rows: int
    num_calls: int


def record_of(kind: type[Arguments]) -> np.dtype[np.void]:
    """Return the layout of arguments in memory, as Numba reads it."""
    return np.dtype([(name, np.int64) for name in kind.__annotations__])


def places_of(kind: type[Arguments], *names: str) -> tuple[int, ...]:
    """Return the positions of arguments, for tables in which they change."""
    fields = list(kind.__annotations__)
    return tuple(fields.index(name) for name in names)
