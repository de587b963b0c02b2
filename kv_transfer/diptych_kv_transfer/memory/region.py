"""Ranges of bytes in memory of any kind, which transports read and write."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray


class MemoryKind(Enum):
    """Who can address the memory."""

    HOST = "host"
    """The processor."""
    DEVICE = "device"
    """An accelerator only, such as a GPU."""


class MemoryRegion(msgspec.Struct, frozen=True):
    """Contiguous bytes. They exist as long as the region does."""

    address: int
    length: int
    """Number of bytes."""
    kind: MemoryKind = MemoryKind.HOST
    device: str = "cpu"
    """The device as torch names it, such as `cuda:0`."""
    owner: object = None
    """The object that owns the memory and has to stay alive."""

    @classmethod
    def of(cls, array: NDArray[np.uint8]) -> MemoryRegion:
        """Return the memory of a contiguous array. Raises `ValueError` for another array."""
        if not array.flags.c_contiguous:
            raise ValueError("an array that is not contiguous is not one region")
        return cls(array.ctypes.data, array.nbytes, owner=array)

    def part(self, start: int, length: int) -> MemoryRegion:
        """Return `length` bytes from `start`. Raises `ValueError` for bytes outside."""
        if not 0 <= start <= start + length <= self.length:
            raise ValueError(f"bytes {start} to {start + length} of {self.length} are outside")
        return MemoryRegion(self.address + start, length, self.kind, self.device, self.owner)

    def array(self) -> NDArray[np.uint8]:
        """Return the bytes as an array [length]. Raises `ValueError` unless the host has them."""
        if self.kind is not MemoryKind.HOST:
            raise ValueError(f"the host cannot address memory of {self.device}")
        return np.asarray(_Interface(self))


class _Interface:
    """A region as NumPy reads it; the array keeps this, and so the region."""

    def __init__(self, region: MemoryRegion) -> None:
        self._region = region

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self._region.length,),
            "typestr": "|u1",
            "data": (self._region.address, False),
        }
