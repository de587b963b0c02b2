"""The blocks that this engine has lent to others, by lease."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.kv_groups import NULL_BLOCK


@dataclass(slots=True)
class LentBlocks:
    """Each lease holds its blocks until it has ended, in addition to the request that computed
    them. So neither the end nor the preemption of the request frees blocks that are being sent."""

    pool: BlockPool
    _blocks: dict[str, list[int]] = field(default_factory=dict)
    _prefixes: set[str] = field(default_factory=set)
    """The leases of prefixes."""
    _in_prefixes: Counter[int] = field(default_factory=Counter)
    """Block -> how many leases of prefixes hold it."""

    def __len__(self) -> int:
        """The number of leases that hold blocks."""
        return sum(map(bool, self._blocks.values()))

    def __contains__(self, lease_id: str) -> bool:
        """Whether a lease of this id has not ended."""
        return lease_id in self._blocks

    def begin(self, lease_id: str) -> None:
        """Begin a lease without blocks."""
        self._blocks[lease_id] = []

    def count(self, lease_id: str) -> int:
        """Return how many blocks a lease has; 0 if it has ended."""
        return len(self._blocks.get(lease_id, ()))

    def lend(self, lease_id: str, block_ids: list[int]) -> list[int]:
        """Pin held blocks, after those that the lease has. Returns all of them."""
        lent = self._blocks[lease_id]
        self.pool.take(block_ids)
        lent.extend(block_ids)
        return list(lent)

    def lend_prefix(self, lease_id: str, names: list[bytes], num_known: int) -> list[int]:
        """Pin the cached blocks of a prefix, in a lease of their own. If these are not more than
        the `num_known` that the reader has, there is no lease.

        Blocks that windows have passed are not lent. What others see of a prefix depends on its
        length, so that it is lent whole, if there are windows, or not.

        Leases of prefixes hold at most half of all blocks, and then lend less than requested,
        because this engine's own requests must not wait for other engines. A block that several of
        them hold counts once.
        """
        found, groups = self.pool.match(names), self.pool.groups
        if groups.windowed:
            whole = len(found) == len(names) * groups.count
            found = [block for block in found if block != NULL_BLOCK] if whole else []
        room = self.pool.num_blocks // 2 - len(self._in_prefixes)
        for place, block in enumerate(found):
            room -= block not in self._in_prefixes
            if room < 0:
                found = [] if groups.windowed else found[:place]
                break
        if len(found) <= num_known or lease_id in self:
            return []
        self.begin(lease_id)
        self._prefixes.add(lease_id)
        self._in_prefixes.update(found)
        return self.lend(lease_id, found)

    def end(self, lease_id: str) -> None:
        """Release the blocks of a lease, which nobody reads any more. A lease that has ended is
        ignored."""
        blocks = self._blocks.pop(lease_id, [])
        if lease_id in self._prefixes:
            self._prefixes.remove(lease_id)
            self._in_prefixes -= Counter(blocks)
        self.pool.release(blocks)
