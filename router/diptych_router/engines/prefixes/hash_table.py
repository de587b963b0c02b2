"""A map from 64-bit hashes to small numbers, a batch at a time.

A dict of Python's takes 120 bytes for an entry; this takes 12, and a look-up of 128 keys takes ten
microseconds. It is open addressing in buckets of 8 places (Knuth, volume 3, 6.4): the highest bits
of a key's product with a secret number select its bucket, so that nobody can choose prompts whose
keys collide. A key is at the first free place of its bucket, or of the next bucket that is not
full. A look-up compares all keys with a whole bucket each, which is one line of the processor's
cache, and few keys need a second one. A key is never removed, because keys behind it would be lost;
its value becomes 0, and the next rebuild drops it.
"""

from __future__ import annotations

import secrets
from typing import Final

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Values = NDArray[np.uint32]

MAX_FILLED: Final = 0.7
"""If a larger share of its places is filled, probing takes long."""
SMALLEST: Final = 1 << 10
BYTES_PER_PLACE: Final = 12
BUCKET: Final = 8
"""The number of places in a bucket."""
_KEY_BITS: Final = 64
_KEY_MASK: Final = (1 << _KEY_BITS) - 1
_FREE = np.uint64(0)
_INSTEAD_OF_FREE = np.uint64(1)


class HashTable:
    """A map whose values are greater than 0; 0 means that there is none."""

    def __init__(self) -> None:
        self._secret = np.uint64(secrets.randbits(_KEY_BITS) | 1)
        self._clear(SMALLEST)

    def _clear(self, num_places: int) -> None:
        self._keys = np.zeros(num_places, np.uint64)
        self._values = np.zeros(num_places, np.uint32)
        self._buckets = self._keys.reshape(-1, BUCKET)
        self._shift = _KEY_BITS + 1 - len(self._buckets).bit_length()
        self._num_filled = 0
        """Places with a key, whatever its value."""

    @property
    def num_places(self) -> int:
        return len(self._keys)

    @property
    def values(self) -> Values:
        """The values of all places, to be read or written; 0 where there is no key. The array is
        another one after the next `put`."""
        return self._values

    def keys(self) -> Keys:
        """Return the keys that have a value."""
        return self._keys[self._values > 0]

    def get(self, keys: Keys) -> Values:
        """Return the value of each key, 0 for those that have none."""
        return self._values[self._find(_sound(keys))]

    def get_one(self, key: int) -> int:
        """Return the same for a single key, ten times as fast as a batch of one."""
        key = key or int(_INSTEAD_OF_FREE)
        bucket = (key * int(self._secret) & _KEY_MASK) >> self._shift
        while True:
            for at, there in enumerate(self._buckets[bucket].tolist()):
                if there == key:
                    return int(self._values[bucket * BUCKET + at])
                if not there:
                    return 0
            bucket = (bucket + 1) % len(self._buckets)

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
        buckets = ((keys * self._secret) >> np.uint64(self._shift)).view(np.int64)
        places = self._in_buckets(buckets, keys)
        open_ = self._is_other(places, keys).nonzero()[0]
        while len(open_):
            buckets[open_] = (buckets[open_] + 1) % len(self._buckets)
            places[open_] = self._in_buckets(buckets[open_], keys[open_])
            open_ = open_[self._is_other(places[open_], keys[open_])]
        return places

    def _in_buckets(self, buckets: NDArray[np.intp], keys: Keys) -> NDArray[np.intp]:
        """The place of each key in its bucket, or the first free one; the place of any other key if
        there is neither."""
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
        keys, values = self.keys(), self._values[self._values > 0]
        size = SMALLEST
        while size * MAX_FILLED < 2 * (len(keys) + more):
            size *= 2
        self._clear(size)
        self._values[self._place(keys)] = values


def _sound(keys: Keys) -> Keys:
    """0 marks a free place; a hash that is 0 passes for 1."""
    return np.maximum(keys, _INSTEAD_OF_FREE)
