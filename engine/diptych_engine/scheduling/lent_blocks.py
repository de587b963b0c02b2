"""The blocks that this engine has lent to others, lease by lease. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from diptych_engine.scheduling.block_pool import BlockPool


@dataclass(slots=True)
class LentBlocks:
    """Each lease holds its blocks once more than whoever computed them, until it has ended: so
    neither the end nor the preemption of the request frees what may be on its way."""

    pool: BlockPool
    _blocks: dict[str, list[int]] = field(default_factory=dict)
    _prefixes: set[str] = field(default_factory=set)
    """The leases of prefixes."""
    _in_prefixes: Counter[int] = field(default_factory=Counter)
    """Block -> how many leases of prefixes hold it."""

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

    def lend_prefix(self, lease_id: str, names: list[bytes], num_known: int) -> list[int]:
        """Pin the blocks of a prefix that are remembered, in a lease of their own; none, and there
        is no lease, if these are not more than the `num_known` that the reader has.

        Leases of prefixes hold a half of all blocks at most, and lend less when more is asked for:
        what runs here must not wait for other engines' readers. A block that several of them hold
        counts once.
        """
        found = self.pool.match(names)
        room = self.pool.num_blocks // 2 - len(self._in_prefixes)
        for place, block in enumerate(found):
            room -= block not in self._in_prefixes
            if room < 0:
                found = found[:place]
                break
        if len(found) <= num_known or lease_id in self:
            return []
        self.begin(lease_id)
        self._prefixes.add(lease_id)
        self._in_prefixes.update(found)
        return self.lend(lease_id, found)

    def end(self, lease_id: str) -> None:
        """Nobody reads the blocks of a lease any more; one that has ended is ignored."""
        blocks = self._blocks.pop(lease_id, [])
        if lease_id in self._prefixes:
            self._prefixes.remove(lease_id)
            self._in_prefixes -= Counter(blocks)
        self.pool.release(blocks)
