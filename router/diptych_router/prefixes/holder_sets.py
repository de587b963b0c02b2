"""Sets of engines by number, each kept once.

The blocks of a prefix are nearly always held by the same engines, so a million blocks have few
different sets, and a block needs only the number of its set.
"""

from __future__ import annotations

from collections.abc import Iterable
from sys import getsizeof
from typing import Final

import numpy as np
from numpy.typing import NDArray

EMPTY: Final = 0
"""The number of the set of nobody."""


class HolderSets:
    """A set is an integer, with a bit for each engine."""

    def __init__(self) -> None:
        self._bits = [0]
        self._number_of = {0: EMPTY}

    def __len__(self) -> int:
        return len(self._bits)

    @property
    def num_bytes(self) -> int:
        """What all sets take: each is an integer, and has a place in a list and in a dict."""
        return sum(map(getsizeof, self._bits)) + 8 * len(self._bits) + getsizeof(self._number_of)

    def bits(self, number: int) -> int:
        return self._bits[number]

    def with_engine(self, numbers: NDArray[np.uint32], engine: int) -> NDArray[np.uint32]:
        """The numbers of these sets with an engine in each."""
        return self._mapped(numbers, 1 << engine, keep=-1)

    def without_engine(self, numbers: NDArray[np.uint32], engine: int) -> NDArray[np.uint32]:
        """The numbers of these sets with the engine in none."""
        return self._mapped(numbers, 0, keep=~(1 << engine))

    def _mapped(self, numbers: NDArray[np.uint32], add: int, keep: int) -> NDArray[np.uint32]:
        different, which = np.unique(numbers, return_inverse=True)
        new = [self._number(self._bits[number] & keep | add) for number in different.tolist()]
        return np.array(new, np.uint32)[which]

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
