"""Which shared prefixes one engine remembers, and its blocks by number. Pure.

The product's `BlockPool` knows each block; here a prefix is one group of blocks. Free blocks are
reused in the order of their release, so a group that nobody holds has lost its first block when as
many were allocated as were free before it. (Groups that are taken back from the middle of
that queue would make it shorter: then a prefix lives a little longer than here.)
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Group:
    """The blocks of one prefix."""

    blocks: int
    holders: int = 1
    released_at: int = 0
    """Blocks allocated, ever, when the last holder let go."""
    ahead: int = 0
    """Free blocks then, all of which are reused before its own."""


@dataclass(slots=True)
class PrefixMemory:
    """Blocks that are free or held, and what they remember."""

    free: int
    """Blocks that nobody holds, remembered prefixes included."""
    allocated: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    fresh: bool = False
    """Something was remembered that nobody has been told of; whoever tells it unsets this."""

    def allocate(self, blocks: int) -> None:
        """Hold fresh blocks. Raises `RuntimeError` if there are not enough."""
        if blocks > self.free:
            raise RuntimeError(f"{blocks} blocks wanted, {self.free} free")
        self.free -= blocks
        self.allocated += blocks

    def find(self, prefix: int) -> tuple[int, int]:
        """Remembered blocks of a prefix, and how many of them nobody holds."""
        group = self.groups.get(prefix)
        if group is None:
            return 0, 0
        if group.holders:
            return group.blocks, 0
        left = group.blocks - max(0, self.allocated - group.released_at - group.ahead)
        if left <= 0:
            del self.groups[prefix]
            return 0, 0
        return left, left

    def remembered(self) -> dict[int, int]:
        """How many blocks of each prefix `find` finds."""
        found = {prefix: self.find(prefix)[0] for prefix in list(self.groups)}
        return {prefix: blocks for prefix, blocks in found.items() if blocks}

    def take(self, prefix: int) -> None:
        """Hold what `find` has found."""
        blocks, idle = self.find(prefix)
        group = self.groups[prefix]
        group.blocks = blocks
        group.holders += 1
        self.free -= idle

    def remember(self, prefix: int, blocks: int, shared: int) -> int:
        """A holder of `shared` blocks of a prefix has computed all of them; returns how many of its
        blocks belong to the group now. Who comes second keeps what it computed for itself."""
        self.fresh = True
        group = self.groups.get(prefix)
        if group is None or (shared == 0 and self.find(prefix) == (0, 0)):
            self.groups[prefix] = Group(blocks)
            return blocks
        if 0 < shared == group.blocks:
            group.blocks = blocks
            return blocks
        return shared

    def release(self, prefix: int, shared: int, private: int) -> None:
        """Let go of private blocks, and of a prefix's if any are shared."""
        self.free += private
        if not shared:
            return
        group = self.groups[prefix]
        group.holders -= 1
        if not group.holders:
            group.released_at, group.ahead = self.allocated, self.free
            self.free += group.blocks
