"""Blocks that cannot come straight into ours land in a staging area, and are unpacked when they are
valid. Pure.

That is so where the peer's blocks have another geometry, and where ours are on a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diptych_kv_transfer.memory.layout import Layout


@dataclass(frozen=True, slots=True)
class Staging:
    """What one load receives in its peer's geometry, and where it belongs in ours."""

    layout: Layout
    """The layout of the blocks in the form in which they arrive."""
    first: int
    """The block of the lease that lands first; it holds token `start`."""
    num_blocks: int
    start: int
    end: int
    """The wanted tokens are those from `start` up to, but not including, `end`."""
    local_block_ids: list[int]
    """Where they go; the first one begins with token `start`."""

    def shortened(self, end: int, num_local: int) -> Staging:
        """The same up to token `end` only, which lies in the last of the first `num_local` of our
        blocks."""
        num_blocks = self.layout.blocks_for(end) - self.first
        local = self.local_block_ids[:num_local]
        return replace(self, num_blocks=num_blocks, end=end, local_block_ids=local)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes * self.layout.num_ranks

    @property
    def places(self) -> dict[int, int]:
        """Block of the lease -> block of the staging area."""
        return {self.first + place: place for place in range(self.num_blocks)}


def plan_staging(theirs: Layout, ours: Layout, wanted: dict[int, int], num_tokens: int) -> Staging:
    """How to fetch the last tokens of a lease of `num_tokens` from blocks of any geometry.

    wanted: our blocks that are missing, as index -> block id; they reach up to the last block. All
    of the peer's blocks that cover any of these tokens are fetched.
    """
    start = min(wanted) * ours.block_size
    first = start // theirs.block_size
    return Staging(
        theirs,
        first,
        theirs.blocks_for(num_tokens) - first,
        start,
        num_tokens,
        [wanted[index] for index in sorted(wanted)],
    )
