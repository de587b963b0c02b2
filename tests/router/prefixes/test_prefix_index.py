"""The router's index of prefixes says what a plain dict of sets says, and takes less room."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from diptych_router.prefixes.hash_table import SMALLEST, HashTable
from diptych_router.prefixes.prefix_index import BlockHolders, PrefixIndex

NUM_ENGINES = 5
BLOCKS = [0, *range(2, 20), 2**64 - 1]
"""0 is the mark of a free place."""
Hashes = NDArray[np.uint64]
hash_lists = st.lists(st.sampled_from(BLOCKS), max_size=8)
changes = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "forget", "rebuild"]),
        st.integers(0, NUM_ENGINES - 1),
        hash_lists,
    ),
    max_size=30,
)


def keys(values: list[int]) -> Hashes:
    return np.array(values, np.uint64)


def longest(held: dict[int, set[int]], chain: list[int]) -> list[int]:
    """How many of a chain's blocks each engine has, one after the other."""
    found = []
    for engine in range(NUM_ENGINES):
        count = 0
        while count < len(chain) and engine in held.get(chain[count], ()):
            count += 1
        found.append(count)
    return found


@settings(max_examples=200)
@given(changes, st.lists(st.sampled_from(BLOCKS), unique=True, max_size=10))
def test_it_says_what_a_dict_of_sets_says(
    made: list[tuple[str, int, list[int]]], chain: list[int]
) -> None:
    index, held = PrefixIndex(), defaultdict[int, set[int]](set)
    for number, (what, engine, values) in enumerate(made):
        if what == "add":
            index.held.add(engine, keys(values))
            for value in values:
                held[value].add(engine)
        elif what == "remove":
            index.held.remove(engine, keys(values))
            for value in values:
                held[value].discard(engine)
        elif what == "forget":
            index.forget_engine(engine)
            for engines in held.values():
                engines.discard(engine)
        else:  # enough others that the table is built anew
            others = np.arange(SMALLEST, dtype=np.uint64) + np.uint64((number + 1) << 32)
            index.held.add(engine, others)
            index.held.remove(engine, others)
    assert index.match(keys(chain), NUM_ENGINES)[0].tolist() == longest(held, chain)
    assert index.held.num_blocks == sum(map(bool, held.values()))


def test_what_was_sent_counts_until_it_is_old() -> None:
    index = PrefixIndex()
    index.held.add(0, keys([10, 11]))
    index.expect(0, keys([10, 11, 12]))
    index.expect(1, keys([10]))
    for _ in range(2):
        assert index.match(keys([10, 11, 12, 13]), 2)[0].tolist() == [3, 1]
        index.age()
    assert index.match(keys([10, 11, 12, 13]), 2)[0].tolist() == [2, 0]


def test_a_gap_ends_a_prefix() -> None:
    index = PrefixIndex()
    index.held.add(3, keys([1, 2, 4]))
    assert index.match(keys([1, 2, 3, 4]), 4)[0].tolist() == [0, 0, 0, 2]
    assert index.match(keys([]), 4)[0].tolist() == [0, 0, 0, 0]


def test_sets_that_nobody_has_any_more_are_forgotten() -> None:
    holders = BlockHolders()
    random = np.random.default_rng(7)
    for _ in range(3000):
        engine = int(random.integers(1000))
        block = random.integers(1, 50, 1, dtype=np.uint64)
        holders.add(engine, block)
        holders.remove(int(random.integers(1000)), block)
    assert holders.num_sets < 10_000
    assert holders.num_blocks <= 49


@pytest.mark.parametrize("count", [100, 100_000])
def test_an_entry_takes_some_forty_bytes(count: int) -> None:
    """Ten million, which the index may have, take less than a gibibyte."""
    holders = BlockHolders()
    random = np.random.default_rng(3)
    for engine in range(10):
        holders.add(engine, random.integers(1, 2**63, count // 10, dtype=np.uint64))
    assert holders.num_blocks == count
    assert holders.num_bytes <= max(12 * SMALLEST + 4096, 70 * count)


def test_a_key_is_found_whatever_came_and_went_before_it() -> None:
    table, random = HashTable(), np.random.default_rng(1)
    for round_ in range(40):
        fresh = random.integers(1, 2**63, 500, dtype=np.uint64)
        places = table.put(fresh)
        table.values[places] = round_ + 1
        assert (table.get(fresh) == round_ + 1).all()
        table.values[table.places_of(fresh[:400])] = 0
        assert (table.get(fresh[:400]) == 0).all()
        assert (table.get(fresh[400:]) == round_ + 1).all()
    assert len(table.keys()) == 40 * 100
