"""Which blocks are moved: the same ones by every way."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10
MEMORY_BYTES = 384 << 20
"""Size, in bytes, of the memory of either process; larger than the processor's caches."""
BLOCK_KIB = (64, 256, 720, 1024)
"""720: sixteen tokens of SmolLM2-135M in float32."""
COUNTS = (1, 16, 256)


@dataclass(frozen=True, slots=True)
class Shape:
    block_bytes: int
    count: int
    scattered: bool

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.count

    @property
    def name(self) -> str:
        where = "scattered" if self.scattered else "in a row"
        return f"{self.count} x {self.block_bytes // KIB} KiB, {where}"

    def spans(self) -> list[tuple[int, int]]:
        """(offset, length) of each run; scattered blocks are never neighbours."""
        if not self.scattered:
            return [(0, self.num_bytes)]
        places = MEMORY_BYTES // self.block_bytes
        order = [*range(0, places, 2), *range(1, places, 2)]
        return [(place * self.block_bytes, self.block_bytes) for place in order[: self.count]]


def all_shapes() -> list[Shape]:
    """Every block size and count; one block is always in a row."""
    return [
        Shape(kib * KIB, count, scattered)
        for kib in BLOCK_KIB
        for count in COUNTS
        for scattered in (False, True)
        if (count > 1 or not scattered) and kib * KIB * count <= MEMORY_BYTES // 2
    ]
