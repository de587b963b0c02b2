"""The router's index of prefixes says what a plain dict of sets says, and takes less room."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from benchmarks.prefix_index import memory_of
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from diptych_router.engines.block_holders import SMALLEST, BlockHolders, HashTable
from diptych_router.engines.known_prefixes import PrefixIndex, lengths

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


def found(index: PrefixIndex, chain: list[int], num_engines: int) -> list[int]:
    blocks: list[int] = lengths(index.match(keys(chain)).soon, num_engines).tolist()
    return blocks


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
    assert found(index, chain, NUM_ENGINES) == longest(held, chain)
    assert index.held.num_blocks == sum(map(bool, held.values()))


PROMPTS = [[2], [2, 3], [2, 3, 4, 5], [2, 3, 4, 6, 7, 8, 9], [10, 11, 12]]
"""Chains of blocks: a block stands behind the same ones wherever it is."""
news = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.integers(0, NUM_ENGINES - 1), hash_lists),
        st.tuples(st.just("drop"), st.integers(0, NUM_ENGINES - 1), hash_lists),
        st.tuples(st.just("store"), st.integers(0, NUM_ENGINES - 1), hash_lists),
        st.tuples(st.just("read"), st.integers(0, NUM_ENGINES - 1), hash_lists),
        st.tuples(st.just("send"), st.integers(1, 2**NUM_ENGINES - 1), st.sampled_from(PROMPTS)),
        st.tuples(st.just("forget"), st.integers(0, NUM_ENGINES - 1), st.just([])),
        st.tuples(st.just("age"), st.just(0), st.just([])),
    ),
    max_size=30,
)


@settings(max_examples=300)
@given(news, st.sampled_from([*PROMPTS, [2, 3, 4, 5, 13, 14]]))
def test_what_is_held_and_what_was_sent_are_one_prefix(
    told: list[tuple[str, int, list[int]]], chain: list[int]
) -> None:
    """Held blocks may have gaps, which those that were sent fill. Those that are on disk only are
    one prefix with the others, and are not in memory."""
    index = PrefixIndex()
    held, stored, new, old = (defaultdict[int, set[int]](set) for _ in range(4))
    for what, engine, values in told:
        if what == "hold":
            index.held.add(engine, keys(values))
            for value in values:
                held[value].add(engine)
        elif what == "drop":
            index.held.remove(engine, keys(values))
            for value in values:
                held[value].discard(engine)
        elif what == "store":
            index.only_stored.add(engine, keys(values))
            for value in values:
                stored[value].add(engine)
        elif what == "read":
            index.only_stored.remove(engine, keys(values))
            for value in values:
                stored[value].discard(engine)
        elif what == "send":
            index.expect(engine, keys(values))
            for value in values:
                new[value] |= {number for number in range(NUM_ENGINES) if engine >> number & 1}
        elif what == "forget":
            index.forget_engine(engine)
            for layer in (held, stored, new, old):
                for engines in layer.values():
                    engines.discard(engine)
        else:
            index.age()
            new, old = defaultdict(set), new
    match = index.match(keys(chain))
    sent = {value: new[value] | old[value] for value in chain}
    memory = {value: held[value] - stored[value] for value in chain}
    soon = {value: memory[value] | sent[value] for value in chain}
    anywhere = {value: held[value] | sent[value] for value in chain}
    assert lengths(match.now, NUM_ENGINES).tolist() == longest(memory, chain)
    assert lengths(match.soon, NUM_ENGINES).tolist() == longest(soon, chain)
    assert lengths(match.stored, NUM_ENGINES).tolist() == longest(anywhere, chain)


def test_what_was_sent_counts_until_it_is_old() -> None:
    index = PrefixIndex()
    index.held.add(0, keys([10, 11]))
    index.expect(0b01, keys([10, 11, 12]))
    index.expect(0b10, keys([10]))
    for _ in range(2):
        assert found(index, [10, 11, 12, 13], 2) == [3, 1]
        index.age()
    assert found(index, [10, 11, 12, 13], 2) == [2, 0]


def test_a_gap_ends_a_prefix() -> None:
    index = PrefixIndex()
    index.held.add(3, keys([1, 2, 4]))
    assert found(index, [1, 2, 3, 4], 4) == [0, 0, 0, 2]
    assert found(index, [], 4) == [0, 0, 0, 0]


def test_sets_that_nobody_has_any_more_are_forgotten() -> None:
    holders = BlockHolders()
    random = np.random.default_rng(7)
    for _ in range(3000):
        engine = int(random.integers(1000))
        block = random.integers(1, 50, 1, dtype=np.uint64)
        holders.add(engine, block)
        holders.remove(int(random.integers(1000)), block)
    assert len(holders._sets.bits) < 10_000
    assert holders.num_blocks <= 49


@pytest.mark.parametrize("count", [100, 100_000])
def test_an_entry_takes_some_forty_bytes(count: int) -> None:
    """Ten million, which the index may have, take less than a gibibyte."""
    holders = BlockHolders()
    random = np.random.default_rng(3)
    for engine in range(10):
        holders.add(engine, random.integers(1, 2**63, count // 10, dtype=np.uint64))
    assert holders.num_blocks == count
    assert memory_of(holders) <= max(12 * SMALLEST + 4096, 70 * count)


def test_a_key_is_found_whatever_came_and_went_before_it() -> None:
    table, random = HashTable(), np.random.default_rng(1)
    for round_ in range(40):
        fresh = random.integers(1, 2**63, 500, dtype=np.uint64)
        places = table.put(fresh)
        table.values[places] = round_ + 1
        assert (table.get(fresh) == round_ + 1).all()
        table.values[table.places_of(fresh[:400])] = 0
        assert (table.get(fresh[:400]) == 0).all()
        assert [table.get_one(key) for key in fresh[398:402].tolist()] == [0, 0, *[round_ + 1] * 2]
        assert (table.get(fresh[400:]) == round_ + 1).all()
    assert len(table.keys()) == 40 * 100
