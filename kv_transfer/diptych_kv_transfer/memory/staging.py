"""Plans how blocks that cannot be received directly arrive in a staging area and are unpacked once
they are valid.

That happens where the peer's blocks have another geometry (`Staging`), and where our blocks are on
a device and the geometry is equal (`StagedCopies`). This module performs no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diptych_kv_transfer.memory.layout import Layout
from diptych_kv_transfer.memory.shard import WHOLE, Part


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
    """Our blocks that it goes to. The first one begins with token `start`."""

    def shortened(self, end: int, num_local: int) -> Staging:
        """Return the same plan up to token `end` only, which is in the last of the first
        `num_local` of our blocks."""
        num_blocks = self.layout.blocks_for(end) - self.first
        local = self.local_block_ids[:num_local]
        return replace(self, num_blocks=num_blocks, end=end, local_block_ids=local)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes * self.layout.num_ranks

    @property
    def places(self) -> dict[int, int]:
        """Return a map from blocks of the lease to blocks of the staging area."""
        return {self.first + place: place for place in range(self.num_blocks)}


@dataclass(frozen=True, slots=True)
class StagedCopies:
    """What one load receives in our own geometry. Blocks are copied as a whole."""

    blocks: list[int]
    """The blocks of the lease, in the order in which they arrive."""
    local_block_ids: list[int]
    """The block of ours that each of them goes to."""
    block_bytes: int
    """Size of one of our blocks, in bytes, over all ranks."""
    part: Part = WHOLE
    """The part of each of our blocks that is filled."""

    def shortened(self, end: int, num_local: int) -> StagedCopies:
        """Return the same plan for the first `num_local` blocks, which end with token `end`."""
        return replace(
            self, blocks=self.blocks[:num_local], local_block_ids=self.local_block_ids[:num_local]
        )

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes // self.part.count

    @property
    def places(self) -> dict[int, int]:
        """Return a map from blocks of the lease to blocks of the staging area."""
        return {block: place for place, block in enumerate(self.blocks)}


AnyStaging = Staging | StagedCopies


def plan_staging(theirs: Layout, ours: Layout, wanted: dict[int, int], num_tokens: int) -> Staging:
    """Plan how to fetch the last tokens of a lease of `num_tokens` from blocks of any geometry.

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
