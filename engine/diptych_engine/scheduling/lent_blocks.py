"""The blocks that this engine has lent to others, lease by lease. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych_engine.scheduling.block_pool import BlockPool


@dataclass(slots=True)
class LentBlocks:
    """Each lease holds its blocks once more than whoever computed them, until it has ended: so
    neither the end nor the preemption of the request frees what may be on its way."""

    pool: BlockPool
    _blocks: dict[str, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many leases hold blocks."""
        return sum(map(bool, self._blocks.values()))

    def __contains__(self, lease_id: str) -> bool:
        """A lease of this id has not ended."""
        return lease_id in self._blocks

    def begin(self, lease_id: str) -> None:
        """There is a new lease, without blocks yet."""
        self._blocks[lease_id] = []

    def count(self, lease_id: str) -> int:
        """How many blocks a lease has; 0 if it has ended."""
        return len(self._blocks.get(lease_id, ()))

    def lend(self, lease_id: str, block_ids: list[int]) -> list[int]:
        """Pin blocks that somebody holds, after those that the lease has. Returns all of them."""
        lent = self._blocks[lease_id]
        self.pool.take(block_ids)
        lent.extend(block_ids)
        return list(lent)

    def end(self, lease_id: str) -> None:
        """Nobody reads the blocks of a lease any more; one that has ended is ignored."""
        self.pool.release(self._blocks.pop(lease_id, []))
