"""Block hashes and the engines that hold them: how much of a prompt each engine need not compute.

Exact up to the delay of the engines' events. Beside what engines say, the index has what was sent
to them a moment ago and they will hold soon, so that a burst of like prompts stays together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diptych_router.prefixes.hash_table import BYTES_PER_PLACE, HashTable, Keys
from diptych_router.prefixes.holder_sets import EMPTY, HolderSets

Lengths = NDArray[np.int32]

MAX_BLOCKS: Final = 10_000_000
"""Beyond, what engines say they hold is not taken in: see `PrefixIndex.is_full`."""
MAX_EXPECTED_BLOCKS: Final = 500_000
"""Likewise, of what was sent to engines in one interval."""
SPARE_SETS: Final = 4096
"""Sets that nobody refers to any more, before they are looked for."""


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
        """An engine holds these blocks now. Returns how many of them it did not hold before."""
        if not len(hashes):
            return 0
        places = self._table.put(np.unique(hashes))
        return self._change(places, self._sets.with_engine(self._table.values[places], engine))

    def remove(self, engine: int, hashes: Keys) -> int:
        """It holds these no more. Returns how many of them it held."""
        places = np.unique(self._table.places_of(hashes))
        if not len(places):
            return 0
        return self._change(places, self._sets.without_engine(self._table.values[places], engine))

    def forget_engine(self, engine: int) -> None:
        """It holds nothing any more."""
        values = self._table.values
        used = np.arange(len(self._sets), dtype=np.uint32)
        values[:] = self._sets.without_engine(used, engine)[values]
        self.num_blocks = int(np.count_nonzero(values))

    def sets_of(self, hashes: Keys) -> NDArray[np.uint32]:
        """The number of the set of each block's holders, for `engines`."""
        return self._table.get(hashes)

    def engines(self, number: int) -> int:
        """The engines of a set, as bits."""
        return self._sets.bits(number)

    @property
    def num_bytes(self) -> int:
        """What the table and the sets take."""
        return self._table.num_places * BYTES_PER_PLACE + self._sets.num_bytes

    @property
    def num_sets(self) -> int:
        """Different sets of engines, also of those that nobody refers to any more."""
        return len(self._sets)

    def _change(self, places: NDArray[np.intp], new: NDArray[np.uint32]) -> int:
        """Give these places other sets. Returns how many of them had another one."""
        values = self._table.values
        num_changed = int(np.count_nonzero(values[places] != new))
        self.num_blocks += int(np.count_nonzero(new)) - int(np.count_nonzero(values[places]))
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
        """Blocks that are held or expected; those that are both count as two."""
        return sum(layer.num_blocks for layer in (self.held, *self._expected))

    def expect(self, engine: int, hashes: Keys) -> None:
        """A prompt with these blocks was sent to an engine."""
        if self._expected[0].num_blocks < MAX_EXPECTED_BLOCKS:
            self._expected[0].add(engine, hashes)

    def age(self) -> None:
        """Forget what was sent before the last call: engines have said by now what they hold."""
        self._expected = [BlockHolders(), self._expected[0]]

    def forget_engine(self, engine: int) -> None:
        for holders in (self.held, *self._expected):
            holders.forget_engine(engine)

    def match(self, hashes: Keys, num_engines: int) -> tuple[Lengths, Lengths]:
        """[num_engines] twice: how many blocks each engine has from the first one on, without a
        gap; with those that it will have soon, and without.

        hashes: the chained hashes of a prompt's full blocks.
        """
        layers = [layer for layer in (self.held, *self._expected) if layer.num_blocks]
        if not layers or not len(hashes):
            nothing = np.zeros(num_engines, np.int32)
            return nothing, nothing
        sets = np.stack([layer.sets_of(hashes) for layer in layers])
        soon = _leading(layers, sets, num_engines)
        now = layers[0] is self.held
        if now and not sets[1:].any():
            return soon, soon
        return soon, _leading(layers[:now], sets[:now], num_engines)


def _leading(layers: Sequence[BlockHolders], sets: NDArray[np.uint32], num_engines: int) -> Lengths:
    """[num_engines] How many blocks from the first one on each engine has in some layer.

    sets: [layers, blocks] The holders of each block.
    """
    lengths = np.zeros(num_engines, np.int32)
    if not layers:
        return lengths
    changes = np.flatnonzero((sets[:, 1:] != sets[:, :-1]).any(axis=0)) + 1
    have = -1
    """The engines that have all blocks so far; all of them, before the first."""
    for start in (0, *changes.tolist()):
        holders = EMPTY
        for layer, number in zip(layers, sets[:, start].tolist(), strict=True):
            holders |= layer.engines(number)
        if start:
            lengths[_members(have & ~holders, num_engines)] = start
        have &= holders
        if not have:
            return lengths
    lengths[_members(have, num_engines)] = sets.shape[1]
    return lengths


def _members(bits: int, num_engines: int) -> NDArray[np.bool_]:
    """[num_engines]: which engines are in a set."""
    data = (bits & ((1 << num_engines) - 1)).to_bytes(-(-num_engines // 8), "little")
    unpacked = np.unpackbits(np.frombuffer(data, np.uint8), count=num_engines, bitorder="little")
    return unpacked.astype(np.bool_)
