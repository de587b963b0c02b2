"""The KV blocks of one engine: who holds them, and which prefixes they have cached.

A prefix has a block of each group of layers (`kv_groups.py`) for each block of its tokens.

It only keeps account of block ids. A block is *held* while its reference count is above zero. When
the count drops to zero, the block joins the free queue but keeps its hash, so that a later prompt
with the same prefix can use it again. The queue is in least-recently-released order. Allocation
takes from its head and forgets the prefix there. Blocks that are pinned (`pinned_blocks.py`) join
it when they are pinned no more, or when it is empty.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from diptych_engine.scheduling.kv_groups import NULL_BLOCK, ONE_GROUP, KVGroups
from diptych_engine.scheduling.pinned_blocks import PinnedBlocks

Name = bytes | tuple[bytes, int]
"""The hash of a prefix, with the number of the group unless that is the first."""


class Seals(Protocol):
    """Follows which blocks' contents are remembered; `KeptBlocks` does."""

    def remembered(self, block: int, name: Name) -> None:
        """A held block contains a prefix from now on."""

    def forgotten(self, block: int) -> None:
        """A block's content may change from now on."""

    def used(self, block: int, *, held: bool) -> None:
        """A block with a prefix has its first holder, or no holder any more."""


class Followed:
    """Hashes of blocks, of which others are told."""

    _changes: dict[bytes, bool] | None = None
    """Hash -> whether it is one of them now, where it was not so at the last `take_changes`; None:
    nobody wants to know."""

    def record_changes(self, wanted: bool) -> None:
        """Start or stop recording the changes for `take_changes`."""
        self._changes = {} if wanted else None

    def take_changes(self) -> dict[bytes, bool]:
        """Return hash -> whether it is one of them, for those that changed since the last call."""
        changes = self._changes
        if not changes:
            return {}
        self._changes = {}
        return changes


class OnlyStored(Followed):
    """The hashes of blocks that can be read back, and are not in memory."""

    def __init__(self) -> None:
        self._hashes: set[bytes] = set()

    def remembered_hashes(self) -> list[bytes]:
        return [*self._hashes]

    def turn(self, block_hash: bytes) -> None:
        """A hash becomes one of them, or is one no longer."""
        self._hashes ^= {block_hash}
        changes = self._changes
        if changes is not None and changes.pop(block_hash, None) is None:
            changes[block_hash] = block_hash in self._hashes


class BlockPool(Followed):
    """Reference-counted blocks `0 .. num_blocks - 1`."""

    def __init__(
        self,
        num_blocks: int,
        groups: KVGroups = ONE_GROUP,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: returns seconds, for pins."""
        self.num_blocks, self.groups = num_blocks, groups
        self._holders = [0] * num_blocks + [1 << 62]
        """The last is for `NULL_BLOCK`, which may be taken and released, and is never free."""
        self._hash_of: list[Name | None] = [None] * (num_blocks + 1)
        self._block_of: dict[Name, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._pins = PinnedBlocks(num_blocks, clock)
        self._pinned = self._pins.count
        self._num_set_aside = 0
        """How many blocks that nobody holds are not in the queue, because they are pinned."""
        self.num_remembered = 0
        """How many of the free blocks contain a prefix that `match` would find."""
        self.unsaved: deque[tuple[int, bytes] | list[bytes]] | None = None
        """Blocks that came to be remembered, and their hashes, for whoever keeps them elsewhere;
        None: nobody does. Of several groups only the first one's. A list has the hashes of a
        prefix that was used."""
        self.seals: Seals | None = None
        self._parts: dict[bytes, tuple[int, list[int]]] = {}
        """By the hash of a full block: the unused block that a former core has begun behind it, and
        the tokens that it has KV of."""
        self._parent_of: dict[int, bytes] = {}
        """By the blocks in `_parts`."""
        self._elsewhere: set[bytes] = set()
        """The hashes of blocks that can be read back from there. Others are told of them as of
        those that are remembered here."""
        self.only_stored = OnlyStored()

    @property
    def num_free(self) -> int:
        """The number of blocks that `allocate` can hand out, including those with
        cached prefixes."""
        return len(self._free) + self._num_set_aside

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def num_pinned_among(self, block_ids: Sequence[int]) -> int:
        """Return how many of these blocks are pinned."""
        return len(self._pinned.keys() & block_ids) if self._pinned else 0

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix. Changes nothing."""
        if self.groups.windowed:
            return self._match_groups(hashes)
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def match_length(self, hashes: Sequence[bytes], former: int) -> int:
        """Return how many blocks `match` would find, beginning at a `former` answer for these
        hashes.

        An unchanged answer takes two look-ups. A prefix is forgotten from its tail, so searching
        backwards finds its end; a gap before that is not noticed.
        """
        count = former
        while count > 0 and hashes[count - 1] not in self._block_of:
            count -= 1
        while count < len(hashes) and hashes[count] in self._block_of:
            count += 1
        if not self.groups.windowed:
            return count
        return self._seen_whole(hashes, count if self.groups.groups[0].window is None else None)

    def _match_groups(self, hashes: Sequence[bytes]) -> list[int]:
        groups, rows = self.groups, len(hashes)
        for group, kind in enumerate(groups.groups):
            if kind.window is None:
                missing = (r for r in range(rows) if _name(hashes[r], group) not in self._block_of)
                rows = next(missing, rows)
        rows = self._seen_whole(hashes, rows)
        found = [NULL_BLOCK] * (rows * groups.count)
        for place in groups.kept(rows * groups.block_size):
            row, group = divmod(place, groups.count)
            found[place] = self._block_of[_name(hashes[row], group)]
        return found

    def _seen_whole(self, hashes: Sequence[bytes], rows: int | None) -> int:
        """Return the longest of these first rows, None for all, behind which windows see only
        cached blocks."""
        groups = self.groups
        gap: int | None = len(hashes) if rows is None else rows
        rows = 0
        while gap:
            rows, passed = gap, groups.passed(gap * groups.block_size)
            missing = (
                row
                for group, first in enumerate(passed)
                if groups.groups[group].window is not None
                for row in range(rows - 1, first - 1, -1)
                if _name(hashes[row], group) not in self._block_of
            )
            gap = next(missing, None)
        return rows if gap is None else 0

    def num_free_among(self, block_ids: Sequence[int]) -> int:
        """Return how many of these blocks nobody holds: taking them reduces
        `num_free` by as many."""
        return sum(self._holders[block] == 0 for block in block_ids)

    def take(self, block_ids: Sequence[int]) -> None:
        """Hold blocks that `match` found."""
        for block in block_ids:
            if self._holders[block] == 0:
                if block in self._pinned:
                    self._num_set_aside -= 1
                else:
                    del self._free[block]
                if self._hash_of[block] is not None:
                    self.num_remembered -= 1
                    if self.seals is not None:
                        self.seals.used(block, held=True)
                if self._parent_of:
                    self._end_part(block)
            self._holders[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hold `count` unused blocks. Check `num_free` first: too few raise and change nothing."""
        if self._pinned:
            self._unpin(self._pins.lapsed(), first=True)
        if count > len(self._free):
            if count > self.num_free:
                raise RuntimeError(f"{count} blocks wanted, {self.num_free} free")
            while count > len(self._free):
                self._unpin(self._pins.give_up(count - len(self._free)), first=True)
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def release(self, block_ids: Sequence[int]) -> None:
        """Release blocks, last one first, so that a chain is forgotten from its tail."""
        for block in reversed(block_ids):
            if self._holders[block] <= 0:
                raise RuntimeError(f"block {block} is released more often than it was taken")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self.seals is not None and self._hash_of[block] is not None:
                    self.seals.used(block, held=False)
                if block in self._pinned:
                    self._num_set_aside += 1
                    self.num_remembered += 1
                    continue
                self._free[block] = None
                if self._hash_of[block] is None:
                    # Nothing to remember: reuse it before any block that holds a prefix.
                    self._free.move_to_end(block, last=False)
                    if self.seals is not None:
                        self.seals.forgotten(block)
                else:
                    self.num_remembered += 1

    def pin(self, hashes: Sequence[bytes], tenant: str, seconds: float, session: str = "") -> None:
        """Have what is cached of a prefix be forgotten after others, for this long; 0: have what
        only this session of the tenant has pinned of it be as if nothing had been said."""
        found = [block for block in reversed(self.match(hashes)) if block != NULL_BLOCK]
        if not seconds:
            self._unpin(self._pins.end(tenant, found, session))
            return
        for block in found:
            if self._holders[block] == 0 and block not in self._pinned:
                del self._free[block]
                self._num_set_aside += 1
        # Those for which there was no room are as if nothing had been said.
        self._unpin(self._pins.add(tenant, found, seconds, session))

    def _unpin(self, block_ids: Sequence[int], *, first: bool = False) -> None:
        """Queue blocks that nobody pins any more. first: they are the next to be forgotten."""
        for block in reversed(block_ids) if first else block_ids:
            if self._holders[block] == 0:
                self._num_set_aside -= 1
                self._free[block] = None
                if first:
                    self._free.move_to_end(block, last=False)

    def allocate_for(self, kept: Sequence[int], first: int) -> list[int]:
        """Hold unused blocks for those kept places of a list that follow its `first` ones. Returns
        how the list goes on. Check `num_free` first."""
        places = [place for place in kept if place >= first]
        block_ids = [NULL_BLOCK] * (places[-1] + 1 - first if places else 0)
        for place, block in zip(places, self.allocate(len(places)), strict=True):
            block_ids[place - first] = block
        return block_ids

    def remember(self, block: int, block_hash: bytes, group: int = 0) -> None:
        """Record that a held block now contains a group's part of the prefix with this hash.

        The first block to do so is kept; a duplicate has no hash.
        """
        name: Name = (block_hash, group) if group else block_hash
        if self._hash_of[block] is None and name not in self._block_of:
            self._hash_of[block] = name
            self._block_of[name] = block
            self._note(name, remembered=True)
            if self.unsaved is not None and not group:
                self.unsaved.append((block, block_hash))
            if self.seals is not None:
                self.seals.remembered(block, name)

    def put_last(self, block: int) -> None:
        """Have an unused block be taken after all others."""
        self._free.move_to_end(block)

    def adopt(self, block: int, name: Name) -> bool:
        """Have an unused block contain a prefix. False: another block contains it already."""
        if name in self._block_of:
            return False
        self._hash_of[block] = name
        self._block_of[name] = block
        self._note(name, remembered=True)
        self.num_remembered += 1
        return True

    def adopt_part(self, block: int, parent: bytes, token_ids: list[int]) -> bool:
        """Have an unused block contain the first tokens after a prefix, for the next request that
        goes on with them. It counts as one without a prefix. False: another block does already."""
        if parent in self._parts:
            return False
        self.put_last(block)
        self._parts[parent], self._parent_of[block] = (block, token_ids), parent
        return True

    def part_behind(self, parent: bytes) -> tuple[int, list[int]] | None:
        """Return the unused block that contains the first tokens after a prefix, and these."""
        return self._parts.get(parent)

    def _end_part(self, block: int) -> None:
        parent = self._parent_of.pop(block, None)
        if parent is not None:
            del self._parts[parent]

    def forget_all(self, *, even_held: bool = False) -> bool:
        """Forget every cached prefix. False, and nothing changes, while any block is held, unless
        held blocks may be forgotten too: their holders keep them, but nobody else finds them."""
        if self.num_free != self.num_blocks and not even_held:
            return False
        self._unpin(self._pins.give_up(self.num_blocks * len(self._pinned)))
        for block in range(self.num_blocks):
            self._forget(block)
        return True

    def forget(self, block_ids: Sequence[int]) -> None:
        """Have nobody else find what these held blocks contain."""
        self._pins.drop(block_ids)
        for block in block_ids:
            if block != NULL_BLOCK:
                self._forget(block)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self.num_remembered -= self._holders[block] == 0
            del self._block_of[block_hash]
            self._hash_of[block] = None
            self._note(block_hash, remembered=False)
        if self._parent_of:
            self._end_part(block)
        if self.seals is not None:  # which may know of what is not remembered yet
            self.seals.forgotten(block)

    # --- for those who follow what is remembered ------------------------------------------------

    # They are told of the first group's blocks, which keep all if any group's do.

    def remembered_hashes(self) -> list[bytes]:
        """Return the hashes of all blocks that `match` would find, or that are kept elsewhere."""
        here = {name for name in self._block_of if isinstance(name, bytes)}
        return [*here | self._elsewhere]

    def kept_elsewhere(self, block_hash: bytes, *, kept: bool) -> None:
        """Record that a block can be read back from elsewhere, or no longer."""
        if kept == (block_hash in self._elsewhere):
            return
        self._elsewhere.discard(block_hash)
        if block_hash not in self._block_of:
            self._note(block_hash, remembered=kept)
            self.only_stored.turn(block_hash)
        if kept:
            self._elsewhere.add(block_hash)

    def _note(self, name: Name, *, remembered: bool) -> None:
        """What was noted of this hash before, if anything, is undone by this."""
        changes, elsewhere = self._changes, self._elsewhere
        if (changes is None and not elsewhere) or not isinstance(name, bytes):
            return
        if name in elsewhere:
            self.only_stored.turn(name)
        elif changes is not None and changes.pop(name, None) is None:
            changes[name] = remembered


def _name(block_hash: bytes, group: int) -> Name:
    return (block_hash, group) if group else block_hash
