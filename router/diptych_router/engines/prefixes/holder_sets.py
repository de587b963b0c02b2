"""Sets of engines by number, each stored once.

The blocks of a prefix nearly always have the same holders. So a million blocks have few different
sets, and a block needs only the number of its set.
"""

from __future__ import annotations

from collections.abc import Iterable
from sys import getsizeof
from typing import Final

import numpy as np
from numpy.typing import NDArray

EMPTY: Final = 0
"""The number of the empty set."""


def run_starts(numbers: NDArray[np.uint32]) -> NDArray[np.intp]:
    """Return the positions at which a number differs from the one before it; the first one always
    does."""
    starts = np.empty(len(numbers), np.bool_)
    starts[:1] = True
    np.not_equal(numbers[1:], numbers[:-1], out=starts[1:])
    return starts.nonzero()[0]


class HolderSets:
    """A set is an integer, with a bit for each engine."""

    def __init__(self) -> None:
        self._bits = [0]
        self._number_of = {0: EMPTY}

    def __len__(self) -> int:
        return len(self._bits)

    @property
    def num_bytes(self) -> int:
        """The memory of all sets: each is an integer, and has a place in a list and in a dict."""
        return sum(map(getsizeof, self._bits)) + 8 * len(self._bits) + getsizeof(self._number_of)

    def bits(self, number: int) -> int:
        return self._bits[number]

    def with_engines(self, numbers: NDArray[np.uint32], engines: int) -> NDArray[np.uint32]:
        """Return the numbers of these sets after adding some engines, as bits, to each."""
        return self._mapped(numbers, engines, keep=-1)

    def without_engine(self, numbers: NDArray[np.uint32], engine: int) -> NDArray[np.uint32]:
        """Return the numbers of these sets after removing the engine from each."""
        return self._mapped(numbers, 0, keep=~(1 << engine))

    def _mapped(self, numbers: NDArray[np.uint32], add: int, keep: int) -> NDArray[np.uint32]:
        """Sets that follow each other are mostly the same one, so each run is looked at once."""
        starts = run_starts(numbers)
        old = numbers[starts].tolist()
        new = {number: self._number(self._bits[number] & keep | add) for number in set(old)}
        mapped = np.array([new[number] for number in old], np.uint32)
        return mapped.repeat(np.diff(starts, append=len(numbers)))

    def _number(self, bits: int) -> int:
        number = self._number_of.get(bits)
        if number is None:
            number = self._number_of[bits] = len(self._bits)
            self._bits.append(bits)
        return number

    def keep_only(self, used: Iterable[int]) -> NDArray[np.uint32]:
        """Forget the other sets. Returns the new number of each old one."""
        old, self._bits, self._number_of = self._bits, [0], {0: EMPTY}
        new = np.zeros(len(old), np.uint32)
        for number in used:
            new[number] = self._number(old[number])
        return new
