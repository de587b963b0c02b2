"""Groups of layers that keep the same of a request's KV, in blocks of one size from one pool.

Layers that attend to a *window* of the last tokens need no blocks of what precedes it. A request
has one list of blocks: for its first tokens a block of each group, then for the next ones, and so
on. A *place* is a position in this list, and a *row* is the places of the same tokens. Where a
window has passed, the list has `NULL_BLOCK`.

One more token than a window has is kept, because a token may be computed again: the last one of a
prompt whose KV came from another engine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from diptych_kv_transfer.memory.layout import KVGroup

NULL_BLOCK: Final = -1
"""Stands for a block that no token attends to any more."""


@dataclass(slots=True)
class KVGroups:
    """The groups of a model. Those that keep all come first. Nobody changes it."""

    groups: tuple[KVGroup, ...]
    step_tokens: int
    """The most tokens of a request that one step computes."""
    block_size: int = field(init=False)
    count: int = field(init=False)
    windowed: bool = field(init=False)
    """Whether any group has a window. Without one there is a single group."""

    def __post_init__(self) -> None:
        self.block_size, self.count = self.groups[0].block_size, len(self.groups)
        self.windowed = any(group.window for group in self.groups)

    def passed(self, num_tokens: int) -> list[int]:
        """Return how many first rows of each group are not kept of a request's first tokens."""
        return [group.kept(num_tokens - 1).start for group in self.groups]

    def kept(self, num_tokens: int) -> list[int]:
        """Return the places, in order, of the blocks that are kept of a request's first tokens."""
        passed = self.passed(num_tokens)
        return [
            row * self.count + group
            for row in range(min(passed), -(-num_tokens // self.block_size))
            for group, first in enumerate(passed)
            if row >= first
        ]

    def most(self, num_tokens: int) -> int:
        """Return how many blocks a request of this many tokens holds at most at a time."""
        size = self.block_size
        rows, total = -(-num_tokens // size), 0
        for group in self.groups:
            # What a step computes, and a window before it, may begin and end within a block.
            at_once = (
                rows if group.window is None else 1 - -(group.window + self.step_tokens) // size
            )
            total += min(rows, at_once)
        return total

    def longest(self, limit: int, num_blocks: int) -> int:
        """Return how many tokens, up to a limit, a request can have that gets all blocks."""
        return bisect_right(range(limit + 1), num_blocks, key=self.most) - 1

    def __str__(self) -> str:
        return " ".join(map(str, self.groups))


ONE_GROUP: Final = KVGroups((KVGroup(1),), 1)
"""All layers keep all, in blocks of any size."""


def num_held(block_ids: Sequence[int]) -> int:
    """Return how many places of a list have a block."""
    return len(block_ids) - block_ids.count(NULL_BLOCK)
