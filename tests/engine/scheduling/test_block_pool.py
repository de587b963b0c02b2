"""The block pool never loses, doubles or mixes up a block."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.kv_groups import NULL_BLOCK, KVGroups
from diptych_kv_transfer.memory.layout import KVGroup
from diptych_protocol.block_hashes import extend_block_hashes


def hashes_of(token_ids: list[int], salt: str | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, 4, salt)
    return hashes


def test_a_released_prefix_is_found_again() -> None:
    pool = BlockPool(4)
    hashes = hashes_of(list(range(8)))
    blocks = pool.allocate(2)
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.remember(block, block_hash)
    pool.release(blocks)
    assert pool.match(hashes) == blocks
    assert pool.num_free == 4


def test_reuse_forgets_the_oldest_prefix_first_and_a_chain_from_its_tail() -> None:
    pool = BlockPool(4)
    old, new = hashes_of([1] * 8), hashes_of([2] * 8)
    for hashes in (old, new):
        blocks = pool.allocate(2)
        for block, block_hash in zip(blocks, hashes, strict=True):
            pool.remember(block, block_hash)
        pool.release(blocks)
    pool.allocate(1)
    assert len(pool.match(old)) == 1
    assert len(pool.match(new)) == 2


def test_blocks_without_a_prefix_are_reused_before_any_remembered_one() -> None:
    pool = BlockPool(2)
    (remembered,), (plain,) = pool.allocate(1), pool.allocate(1)
    pool.remember(remembered, b"h")
    pool.release([remembered])
    pool.release([plain])
    assert pool.allocate(1) == [plain]


def test_a_hash_covers_everything_before_it_and_the_salt() -> None:
    same_tail = [hashes_of([first, 0, 0, 0, 5, 6, 7, 8])[1] for first in (1, 2)]
    assert same_tail[0] != same_tail[1]
    assert hashes_of([1, 2, 3, 4], "a") != hashes_of([1, 2, 3, 4], "b")


@pytest.mark.parametrize("count", [3, 100])
def test_asking_for_too_many_blocks_raises_and_changes_nothing(count: int) -> None:
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="2 free"):
        pool.allocate(count)
    pool.check_integrity()
    assert pool.num_free == 2


def test_releasing_twice_is_an_error_not_a_silent_corruption() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(blocks)


@given(
    st.sampled_from([(None, 5), (6,), (None, None, 3, 9)]),
    st.sets(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=32),
    st.integers(0, 8),
)
def test_the_longest_prefix_is_found_of_which_all_that_is_seen_is_cached(
    windows: tuple[int | None, ...], forgotten: set[tuple[int, int]], former: int
) -> None:
    groups = KVGroups(tuple(KVGroup(4, window) for window in windows), 1)
    pool, hashes = BlockPool(32, groups), hashes_of(list(range(32)))
    blocks = {
        (row, group): block
        for row in range(8)
        for group, block in enumerate(pool.allocate(len(windows)))
        if (row, group) not in forgotten
    }
    for (row, group), block in blocks.items():
        pool.remember(block, hashes[row], group)
    count = len(windows)
    whole = [
        rows
        for rows in range(9)
        if all(divmod(place, count) in blocks for place in groups.kept(4 * rows))
    ]
    found = pool.match(hashes)
    assert len(found) == whole[-1] * count
    kept = set(groups.kept(4 * whole[-1]))
    for place, block in enumerate(found):
        assert block == (blocks[divmod(place, count)] if place in kept else NULL_BLOCK)
    told = {hash_ for row, hash_ in enumerate(hashes) if (row, 0) in blocks}
    assert set(pool.remembered_hashes()) == told, "others hear of the first group's"
    if not {(row, group) for row, group in forgotten if not group} and len(windows) < 3:
        assert pool.match_length(hashes, min(former, whole[-1])) == whole[-1]
    pool.take(found)
    pool.release(found)
    pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Any order of operations keeps the books straight."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.held: list[list[int]] = []
        self.pool.record_changes(True)
        self.told: set[bytes] = set()

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            blocks = self.pool.allocate(count)
            assert len(set(blocks)) == count
            assert not {b for held in self.held for b in held} & set(blocks)
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        start = data.draw(st.integers(0, 2))
        for block, block_hash in zip(held, hashes_of([start] * 4 * len(held)), strict=True):
            self.pool.remember(block, block_hash)

    @rule(start=st.integers(0, 2), length=st.integers(1, 8))
    def match_and_take(self, start: int, length: int) -> None:
        found = self.pool.match(hashes_of([start] * 4 * length))
        before = self.pool.num_free
        costs = self.pool.num_free_among(found)
        self.pool.take(found)
        assert self.pool.num_free == before - costs
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(start=st.integers(0, 2), row=st.integers(0, 7), kept=st.booleans())
    def keep_elsewhere(self, start: int, row: int, kept: bool) -> None:
        self.pool.kept_elsewhere(hashes_of([start] * 32)[row], kept=kept)

    @rule()
    def tell(self) -> None:
        for block_hash, remembered in self.pool.take_changes().items():
            assert (block_hash in self.told) != remembered
            (self.told.add if remembered else self.told.remove)(block_hash)
        assert self.told == set(self.pool.remembered_hashes())

    @rule()
    def forget_all(self) -> None:
        assert self.pool.forget_all() == (not any(self.held))

    @invariant()
    def books_are_straight(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == 8 - len({b for held in self.held for b in held})


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40)
