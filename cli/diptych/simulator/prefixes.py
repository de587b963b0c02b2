"""Which shared prefixes one engine remembers, and its blocks by number. Pure.

The product's `BlockPool` knows each block; here the blocks of a part of a prompt (`PromptPart`) are
one group. Free blocks wait in the order of their release and are reused from the first one on. A
prompt releases its last block first: so what was used least recently is forgotten first, and a
prefix from its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple


class PromptPart(NamedTuple):
    """A part of a prompt that other prompts may have as well."""

    key: int
    """The same in two prompts if they are equal up to the part's end; 0 or more."""
    end: int
    """Tokens of the prompt up to its end."""


Chain = tuple[PromptPart, ...]
"""The beginning of a prompt, part by part."""


@dataclass(slots=True)
class PartBlocks:
    """The blocks of one part."""

    blocks: int
    """The leading ones that are still remembered."""
    holders: int = 1


@dataclass(slots=True)
class PrefixMemory:
    """Blocks that are free or held, and what they remember."""

    free: int
    """Blocks that nobody holds, remembered prefixes included."""
    block_size: int
    """Tokens of a block."""
    groups: dict[int, PartBlocks] = field(default_factory=dict)
    """By the keys of parts."""
    _queue: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Free blocks in the order of their reuse: numbers of blocks by the keys of groups that nobody
    holds, and by numbers below 0 for blocks that remember nothing that others ask for."""
    _names: Iterator[int] = field(default_factory=lambda: count(-1, -1))
    changed: set[int] = field(default_factory=set)
    """The parts of which more or less is remembered than was told; whoever tells it clears this."""

    def __post_init__(self) -> None:
        self._queue[next(self._names)] = self.free

    def allocate(self, blocks: int) -> None:
        """Hold fresh blocks, which forget what they remembered. Raises `RuntimeError` if there are
        not enough."""
        if blocks > self.free:
            raise RuntimeError(f"{blocks} blocks wanted, {self.free} free")
        self.free -= blocks
        while blocks:
            key, there = self._queue.popitem(last=False)
            left = max(0, there - blocks)
            blocks -= there - left
            if left:
                self._queue[key] = left
                self._queue.move_to_end(key, last=False)
            if key >= 0:
                self.changed.add(key)
            if key >= 0 and left:
                self.groups[key].blocks = left
            elif key >= 0:
                del self.groups[key]

    def find(self, chain: Chain, most: int) -> tuple[int, int]:
        """Leading blocks of a prompt that are remembered, `most` of them if there are more; and the
        blocks that nobody holds now and that `take` would hold."""
        found, idle = 0, 0
        for key, used in self._known(chain, most):
            found += used
            idle += self._queue.get(key, 0)
        return found, idle

    def take(self, chain: Chain, most: int) -> dict[int, int]:
        """Hold what `find` finds: by part, how many of the holder's blocks belong to it."""
        held = dict(self._known(chain, most))
        for key in held:
            self.free -= self._queue.pop(key, 0)
            self.groups[key].holders += 1
        return held

    def remember(self, key: int, blocks: int, mine: int) -> int:
        """Somebody who holds `mine` blocks of a part has computed all of them; returns how many of
        its blocks belong to the part now. Who comes second keeps what it computed for itself."""
        self.changed.add(key)
        group = self.groups.get(key)
        if group is None:
            self.groups[key] = PartBlocks(blocks)
            return blocks
        if 0 < mine == group.blocks:
            group.blocks = blocks
            return blocks
        return mine

    def release(self, held: Mapping[int, int], private: int) -> None:
        """Let go of private blocks, and then of parts, the last one first."""
        if private:
            self.free += private
            self._queue[next(self._names)] = private
        for key in reversed(list(held)):
            group = self.groups[key]
            group.holders -= 1
            if not group.holders:
                self._queue[key] = group.blocks
                self.free += group.blocks

    def _known(self, chain: Chain, most: int) -> Iterator[tuple[int, int]]:
        """The leading parts that are remembered, and how many of their blocks the prompt uses: of
        the last one maybe not all."""
        begin, found = 0, 0
        for key, end in chain:
            wanted = end // self.block_size - begin
            group = self.groups.get(key)
            used = min(wanted, most - found, group.blocks if group else 0)
            if used:
                yield key, used
            if used < wanted:
                return
            begin, found = begin + wanted, found + used
