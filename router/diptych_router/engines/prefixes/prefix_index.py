"""Maps block hashes to the engines that hold them: how much of a prompt each engine need not
compute.

It is exact up to the delay of the engines' events. Beside engines' reports, it contains what was
sent to them a moment ago and they will hold soon, so that a burst of similar prompts stays
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diptych_router.engines.prefixes.hash_table import BYTES_PER_PLACE, HashTable, Keys
from diptych_router.engines.prefixes.holder_sets import HolderSets

Lengths = NDArray[np.int32]
Run = tuple[int, int]
"""The first of consecutive blocks of a prompt that the same engines hold, and these engines as
bits."""

MAX_BLOCKS: Final = 10_000_000
"""Beyond this, further reports are ignored: see `PrefixIndex.is_full`."""
MAX_EXPECTED_BLOCKS: Final = 500_000
"""The same limit for what was sent to engines in one interval."""
SPARE_SETS: Final = 4096
"""How many unused sets may accumulate before they are removed."""
NOBODY: Final[list[Run]] = [(0, 0)]


Leading = tuple[int, int]
"""A number of blocks, and the engines that have this many of a prompt from the first one on."""


class Match(NamedTuple):
    """Which engines have how much of a prompt, the least first; each engine that has any of it
    once."""

    soon: list[Leading]
    """Including what was sent there a moment ago."""
    now: list[Leading]

    @property
    def longest(self) -> int:
        """The most blocks that any engine has, or will have soon."""
        return self.soon[-1][0] if self.soon else 0


class BlockHolders:
    """Which engines hold a block. An engine is a number from 0 on, small because sets of engines
    have a bit for each."""

    def __init__(self) -> None:
        self._table = HashTable()
        self._sets = HolderSets()
        self._tidy_at = SPARE_SETS
        self.num_blocks = 0
        """Different blocks that somebody holds."""

    def add(self, engine: int, hashes: Keys) -> int:
        """Record that an engine holds these blocks. Returns how many of them it did not hold
        before."""
        if not len(hashes):
            return 0
        return self.add_chain(1 << engine, np.unique(hashes))

    def add_chain(self, engines: int, hashes: Keys) -> int:
        """Record that some engines, as bits, hold these blocks of one prompt, which are all
        different. Returns as `add`."""
        places = self._table.put(hashes)
        old = self._table.values[places]
        return self._change(places, old, self._sets.with_engines(old, engines))

    def remove(self, engine: int, hashes: Keys) -> int:
        """Record that it no longer holds these blocks. Returns how many of them it held."""
        places = np.unique(self._table.places_of(hashes))
        if not len(places):
            return 0
        old = self._table.values[places]
        return self._change(places, old, self._sets.without_engine(old, engine))

    def forget_engine(self, engine: int) -> None:
        """Record that it no longer holds anything."""
        values = self._table.values
        used = np.arange(len(self._sets), dtype=np.uint32)
        values[:] = self._sets.without_engine(used, engine)[values]
        self.num_blocks = int(np.count_nonzero(values))

    def runs(self, hashes: Keys) -> list[Run]:
        """Return the holders of the blocks of a prompt, from the first one on."""
        sets = self._table.get(hashes)
        starts = [0, *((sets[1:] != sets[:-1]).nonzero()[0] + 1).tolist()]
        return [(at, self._sets.bits(int(sets[at]))) for at in starts]

    def runs_of_whole(self, hashes: Keys) -> list[Run]:
        """Return the same, where each holder of a block of a prompt holds all blocks before it. So
        if two blocks have the same holders, all blocks between them have these too, and few blocks
        need a look-up."""
        at, last = 0, len(hashes) - 1
        here, end = self._set_of(hashes, at), self._set_of(hashes, last)
        runs = [(at, self._sets.bits(here))]
        while here != end:
            low, high = at, last
            while high - low > 1:
                middle = (low + high) // 2
                if self._set_of(hashes, middle) == here:
                    low = middle
                else:
                    high = middle
            at, here = high, self._set_of(hashes, high)
            runs.append((at, self._sets.bits(here)))
        return runs

    def _set_of(self, hashes: Keys, at: int) -> int:
        return self._table.get_one(int(hashes[at]))

    @property
    def num_bytes(self) -> int:
        """The memory of the table and the sets."""
        return self._table.num_places * BYTES_PER_PLACE + self._sets.num_bytes

    @property
    def num_sets(self) -> int:
        """The number of different sets of engines, including unused ones."""
        return len(self._sets)

    def _change(
        self, places: NDArray[np.intp], old: NDArray[np.uint32], new: NDArray[np.uint32]
    ) -> int:
        """Give these places other sets. Returns how many of them had another one."""
        values = self._table.values
        num_changed = int(np.count_nonzero(old != new))
        self.num_blocks += int(np.count_nonzero(new)) - int(np.count_nonzero(old))
        values[places] = new
        if len(self._sets) > self._tidy_at:
            used = np.unique(values)
            values[:] = self._sets.keep_only(used.tolist())[values]
            self._tidy_at = 2 * len(self._sets) + SPARE_SETS
        return num_changed


class PrefixIndex:
    """What engines hold, and what they will hold soon."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.held = BlockHolders()
        self._max_blocks = max_blocks
        self._expected = [BlockHolders(), BlockHolders()]
        """What was sent to engines since the last `age`, and between that and the one before."""

    @property
    def is_full(self) -> bool:
        return self.held.num_blocks >= self._max_blocks

    @property
    def num_known(self) -> int:
        """Blocks that are held or expected; those that are both count twice."""
        newest, before = self._expected
        return self.held.num_blocks + newest.num_blocks + before.num_blocks

    def expect(self, engines: int, hashes: Keys) -> None:
        """Record that a prompt with these blocks, beginning with its first one, was sent to some
        engines, as bits."""
        if self._expected[0].num_blocks < MAX_EXPECTED_BLOCKS and len(hashes):
            self._expected[0].add_chain(engines, hashes)

    def age(self) -> None:
        """Forget what was sent before the last call, because engines have reported it by now."""
        self._expected = [BlockHolders(), self._expected[0]]

    def forget_engine(self, engine: int) -> None:
        for holders in (self.held, *self._expected):
            holders.forget_engine(engine)

    def match(self, hashes: Keys) -> Match:
        """Return which engines have a prompt's blocks from the first one on, without a gap.

        hashes: the chained hashes of the prompt's full blocks.
        """
        num_blocks = len(hashes)
        if not num_blocks:
            return Match([], [])
        held = self.held.runs(hashes) if self.held.num_blocks else NOBODY
        now = _leading(held, num_blocks)
        layers = [x.runs_of_whole(hashes) for x in self._expected if x.num_blocks]
        layers = [runs for runs in layers if runs != NOBODY]
        return Match(_leading(_united([held, *layers]), num_blocks) if layers else now, now)


def _united(layers: Sequence[Sequence[Run]]) -> list[Run]:
    """Who holds each block in some layer."""
    changes = sorted(
        (at, layer, engines) for layer, runs in enumerate(layers) for at, engines in runs
    )
    here = [0] * len(layers)
    united: dict[int, int] = {}
    for at, layer, engines in changes:
        here[layer] = engines
        united[at] = reduce(or_, here)
    return list(united.items())


def _leading(runs: Sequence[Run], num_blocks: int) -> list[Leading]:
    """See `Match`."""
    found = []
    have = runs[0][1]
    for at, engines in runs[1:]:
        if lost := have & ~engines:
            found.append((at, lost))
            have &= engines
    if have:
        found.append((num_blocks, have))
    return found


def lengths(found: Sequence[Leading], num_engines: int) -> Lengths:
    """Return [num_engines], how many blocks of a prompt each engine has."""
    blocks = np.zeros(num_engines, np.int32)
    for length, engines in found:
        blocks[members(engines, num_engines)] = length
    return blocks


def members(bits: int, num_engines: int) -> NDArray[np.bool_]:
    """Return [num_engines], which engines are in a set."""
    data = (bits & ((1 << num_engines) - 1)).to_bytes(-(-num_engines // 8), "little")
    unpacked = np.unpackbits(np.frombuffer(data, np.uint8), count=num_engines, bitorder="little")
    return unpacked.view(np.bool_)
