"""Which engines hold which blocks: a table from hashes to sets of engines.

The blocks of a prefix nearly always have the same holders. So a million blocks have few different
sets, and a block needs only the number of its set.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Values = NDArray[np.uint32]

MAX_FILLED: Final = 0.7
"""If a larger share of its places is filled, probing takes long."""
SMALLEST: Final = 1 << 10
BUCKET: Final = 8
FEW: Final = 8
"""So many keys are found one by one in less time than together."""
_KEY_BITS: Final = 64
_KEY_MASK: Final = (1 << _KEY_BITS) - 1
_FREE = np.uint64(0)
_INSTEAD_OF_FREE = np.uint64(1)


class HashTable:
    """A map from 64-bit hashes to numbers greater than 0, a batch at a time; 0: there is none.

    A dict of Python's takes 120 bytes for an entry; this takes 12, and a look-up of 128 keys takes
    ten microseconds. It is open addressing in buckets of 8 places (Knuth, volume 3, 6.4): the
    highest bits of a key's product with a secret number select its bucket, so that nobody can
    choose prompts whose keys collide. A key is at the first free place of its bucket, or of the
    next bucket that is not full. A look-up compares all keys with a whole bucket each, which is one
    line of the processor's cache, and few keys need a second one. A key is never removed, because
    keys behind it would be lost; its value becomes 0, and the next rebuild drops it.
    """

    def __init__(self) -> None:
        self._secret = np.uint64(secrets.randbits(_KEY_BITS) | 1)
        self._clear(SMALLEST)

    def _clear(self, num_places: int) -> None:
        self._keys = np.zeros(num_places, np.uint64)
        self.values: Values = np.zeros(num_places, np.uint32)
        """The values of all places, to be read or written; 0 where there is no key. The array is
        another one after the next `put`."""
        self._buckets = self._keys.reshape(-1, BUCKET)
        self._shift = _KEY_BITS + 1 - len(self._buckets).bit_length()
        self._num_filled = 0
        """Places with a key, whatever its value."""

    def keys(self) -> Keys:
        """Return the keys that have a value."""
        return self._keys[self.values > 0]

    def get(self, keys: Keys) -> Values:
        """Return the value of each key, 0 for those that have none."""
        return self.values[self._find(_sound(keys))]

    def get_one(self, key: int) -> int:
        """Return the same for a single key."""
        return int(self.values[self._find_one(key or int(_INSTEAD_OF_FREE))])

    def put(self, keys: Keys) -> NDArray[np.intp]:
        """Add missing keys, without a value. Returns the positions in `values` of the values of all
        of them, valid until the next call. No key may occur twice."""
        keys = _sound(keys)
        if self._num_filled + len(keys) > MAX_FILLED * len(self._keys):
            self._rebuild(len(keys))
        return self._place(keys)

    def places_of(self, keys: Keys) -> NDArray[np.intp]:
        """Return the positions of the values of those keys that exist."""
        places = self._find(_sound(keys))
        known: NDArray[np.intp] = places[self._keys[places] != _FREE]
        return known

    def _find(self, keys: Keys) -> NDArray[np.intp]:
        """The place of each key, or the free place that ends the search for it."""
        if len(keys) <= FEW:
            return np.array([*map(self._find_one, keys.tolist())], np.intp)
        buckets = ((keys * self._secret) >> np.uint64(self._shift)).view(np.int64)
        places = self._in_buckets(buckets, keys)
        open_ = self._is_other(places, keys).nonzero()[0]
        while len(open_):
            buckets[open_] = (buckets[open_] + 1) % len(self._buckets)
            places[open_] = self._in_buckets(buckets[open_], keys[open_])
            open_ = open_[self._is_other(places[open_], keys[open_])]
        return places

    def _find_one(self, key: int) -> int:
        """Do the same for a single key, ten times as fast as for a batch of one."""
        bucket = (key * int(self._secret) & _KEY_MASK) >> self._shift
        while True:
            for at, there in enumerate(self._buckets[bucket].tolist()):
                if not there or there == key:
                    return bucket * BUCKET + at
            bucket = (bucket + 1) % len(self._buckets)

    def _in_buckets(self, buckets: NDArray[np.intp], keys: Keys) -> NDArray[np.intp]:
        """The place of each key in its bucket, else a free one, else that of any other key."""
        there = self._buckets.take(buckets, axis=0)
        ends = there == keys[:, np.newaxis]
        ends |= there == _FREE
        places: NDArray[np.intp] = buckets * BUCKET + ends.argmax(axis=1)
        return places

    def _is_other(self, places: NDArray[np.intp], keys: Keys) -> NDArray[np.bool_]:
        found = self._keys[places]
        other: NDArray[np.bool_] = (found != keys) & (found != _FREE)
        return other

    def _place(self, keys: Keys) -> NDArray[np.intp]:
        places = self._find(keys)
        missing = (self._keys[places] == _FREE).nonzero()[0]
        while len(missing):
            # Of several keys that find the same free place one gets it; the others look again.
            self._keys[places[missing]] = keys[missing]
            won = self._keys[places[missing]] == keys[missing]
            self._num_filled += int(np.count_nonzero(won))
            missing = missing[~won]
            if len(missing):
                places[missing] = self._find(keys[missing])
        return places

    def _rebuild(self, more: int) -> None:
        """Leave behind what has no value, and make room for more keys."""
        keys, values = self.keys(), self.values[self.values > 0]
        size = SMALLEST
        while size * MAX_FILLED < 2 * (len(keys) + more):
            size *= 2
        self._clear(size)
        self.values[self._place(keys)] = values


def _sound(keys: Keys) -> Keys:
    """0 marks a free place; a hash that is 0 passes for 1."""
    return np.maximum(keys, _INSTEAD_OF_FREE)


EMPTY: Final = 0
"""The number of the empty set."""


def run_starts(numbers: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Return which numbers differ from the one before them; the first does."""
    starts = np.empty(len(numbers), np.bool_)
    starts[:1] = True
    np.not_equal(numbers[1:], numbers[:-1], out=starts[1:])
    return starts


class HolderSets:
    """Sets of engines by number, each stored once, as an integer with a bit for each engine."""

    def __init__(self) -> None:
        self.bits = [0]
        """By their numbers."""
        self._number_of = {0: EMPTY}

    def changed(
        self, numbers: NDArray[np.uint32], *, add: int = 0, remove: int = 0
    ) -> NDArray[np.uint32]:
        """Return the numbers of these sets after adding or removing some engines, as bits."""
        # Sets that follow each other are mostly the same one, so each run is looked at once.
        starts = run_starts(numbers)
        old = numbers[starts].tolist()
        new = {}
        for number in set(old):
            new[number] = self._number(self.bits[number] & ~remove | add)
        mapped: NDArray[np.uint32] = np.array([*map(new.__getitem__, old)], np.uint32)
        return mapped.take(starts.cumsum() - 1)

    def _number(self, bits: int) -> int:
        number = self._number_of.get(bits)
        if number is None:
            number = self._number_of[bits] = len(self.bits)
            self.bits.append(bits)
        return number

    def keep_only(self, used: Iterable[int]) -> NDArray[np.uint32]:
        """Forget the other sets. Returns the new number of each old one."""
        old, self.bits, self._number_of = self.bits, [0], {0: EMPTY}
        new = np.zeros(len(old), np.uint32)
        for number in used:
            new[number] = self._number(old[number])
        return new


Run = tuple[int, int]
"""The first of consecutive blocks that the same engines hold, and these engines as bits."""
SPARE_SETS: Final = 4096
"""How many unused sets may accumulate before they are removed."""


class BlockHolders:
    """Which engines hold a block. An engine is a small number, as sets have a bit for each."""

    def __init__(self) -> None:
        self._table = HashTable()
        self._sets = HolderSets()
        self._tidy_at = SPARE_SETS
        self.num_blocks = 0
        """Different blocks that somebody holds."""

    def add(self, engine: int, hashes: Keys) -> int:
        """Record that an engine holds these blocks. Returns how many it did not hold before."""
        if not len(hashes):
            return 0
        return self.add_chain(1 << engine, np.unique(hashes))

    def add_chain(self, engines: int, hashes: Keys) -> int:
        """Record that some engines, as bits, hold these blocks, all different. Returns as `add`."""
        places = self._table.put(hashes)
        old = self._table.values[places]
        return self._change(places, old, self._sets.changed(old, add=engines))

    def remove(self, engine: int, hashes: Keys) -> int:
        """Record that it no longer holds these blocks. Returns how many of them it held."""
        places = np.unique(self._table.places_of(hashes))
        if not len(places):
            return 0
        old = self._table.values[places]
        return self._change(places, old, self._sets.changed(old, remove=1 << engine))

    def forget_engine(self, engine: int) -> None:
        """Record that it no longer holds anything."""
        values = self._table.values
        used = np.arange(len(self._sets.bits), dtype=np.uint32)
        values[:] = self._sets.changed(used, remove=1 << engine)[values]
        self.num_blocks = int(np.count_nonzero(values))

    def runs(self, hashes: Keys) -> list[Run]:
        """Return the holders of the blocks of a prompt, from the first one on."""
        sets = self._table.get(hashes)
        starts = run_starts(sets).nonzero()[0].tolist()
        return [(at, self._sets.bits[int(sets[at])]) for at in starts]

    def runs_of_whole(self, hashes: Keys) -> list[Run]:
        """Return the same, where each holder of a block holds all blocks before it. So blocks
        between two that have the same holders have these too, and few blocks need a look-up."""
        at, last = 0, len(hashes) - 1
        here = self._table.get_one(int(hashes[at]))
        end = self._table.get_one(int(hashes[last]))
        runs = [(at, self._sets.bits[here])]
        while here != end:
            low, high = at, last
            while high - low > 1:
                middle = (low + high) // 2
                if self._table.get_one(int(hashes[middle])) == here:
                    low = middle
                else:
                    high = middle
            at, here = high, self._table.get_one(int(hashes[high]))
            runs.append((at, self._sets.bits[here]))
        return runs

    def _change(
        self, places: NDArray[np.intp], old: NDArray[np.uint32], new: NDArray[np.uint32]
    ) -> int:
        """Give these places other sets. Returns how many of them had another one."""
        values = self._table.values
        num_changed = int(np.count_nonzero(old != new))
        self.num_blocks += int(np.count_nonzero(new)) - int(np.count_nonzero(old))
        values[places] = new
        if len(self._sets.bits) > self._tidy_at:
            used = np.unique(values)
            values[:] = self._sets.keep_only(used.tolist())[values]
            self._tidy_at = 2 * len(self._sets.bits) + SPARE_SETS
        return num_changed
