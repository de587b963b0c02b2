"""The block pool never loses, doubles or mixes up a block."""

from __future__ import annotations

import pytest
from engine_kit.block_checks import check_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.kv_groups import NULL_BLOCK, KVGroups
from diptych_engine.scheduling.pinned_blocks import IDLE_S
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
    check_blocks(pool)
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
    check_blocks(pool)


class Turns:
    """A pool, a clock, and conversations that take one turn after the other."""

    def __init__(self, num_blocks: int) -> None:
        self.now = 0.0
        self.pool = BlockPool(num_blocks, clock=lambda: self.now)

    def take(
        self, hashes: list[bytes], *, pin_s: float = 0.0, tenant: str = "", session: str = ""
    ) -> int:
        """Have a prompt of these blocks come and end. Returns how many were remembered."""
        found = self.pool.match(hashes)
        self.pool.take(found)
        blocks = [*found, *self.pool.allocate(len(hashes) - len(found))]
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.pool.remember(block, block_hash)
        if pin_s or session:
            self.pool.pin(hashes, tenant, pin_s, session)
        self.pool.release(blocks)
        check_blocks(self.pool)
        return len(found)


def chain(name: int, length: int) -> list[bytes]:
    return hashes_of([name] * 4 * length)


def test_a_prefix_whose_next_turn_is_expected_is_forgotten_after_all_others() -> None:
    turns = Turns(16)
    turns.take(chain(1, 4), pin_s=300)
    for other in range(2, 20):
        turns.take(chain(other, 6))
    assert turns.take(chain(1, 5), pin_s=300) == 4


def test_a_pin_keeps_no_block_from_who_needs_it_and_goes_from_its_end() -> None:
    turns = Turns(16)
    turns.take(chain(1, 6), pin_s=300)
    turns.take(chain(2, 6), pin_s=300)
    turns.pool.release(turns.pool.allocate(6))
    assert len(turns.pool.match(chain(1, 6))) == 4, "the oldest, of which the end"
    assert len(turns.pool.match(chain(2, 6))) == 6
    assert len(turns.pool.allocate(16)) == 16


def test_a_pin_lapses_unless_a_turn_renews_it() -> None:
    turns = Turns(16)
    for name, seconds in ((1, 3600), (2, 300), (3, 300)):
        turns.take(chain(name, 3), pin_s=seconds)
    for now in range(0, 400, 50):
        turns.now = float(now)
        if now == 200:
            turns.take(chain(3, 3), pin_s=300)
        turns.take(chain(100 + now, 6))
    assert [turns.take(chain(name, 3)) for name in (1, 2, 3)] == [3, 0, 3]


def test_what_two_tenants_pin_is_pinned_until_neither_does() -> None:
    turns = Turns(16)
    turns.take(chain(1, 3), pin_s=300, tenant="a")
    turns.take(chain(1, 3), pin_s=100, tenant="b")
    turns.now = 200.0
    turns.take(chain(2, 13))
    assert len(turns.pool.match(chain(1, 3))) == 3
    turns.now = 300.0
    turns.take(chain(3, 13))
    turns.take(chain(4, 13))
    assert not turns.pool.match(chain(1, 3))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=40), st.integers(0, 3))
def test_a_tenant_that_pins_too_much_costs_others_none_of_what_they_may_pin(
    lies: list[tuple[int, int]], others: int
) -> None:
    turns = Turns(64)
    for name in range(others):
        turns.take(chain(200 + name, 12), pin_s=300, tenant=f"{name}")
    for name, length in lies:
        turns.take(chain(name, length), pin_s=3600, tenant="liar")
    assert all(len(turns.pool.match(chain(200 + n, 12))) == 12 for n in range(others))


def test_what_nobody_has_come_back_to_is_given_up_before_what_is_used_whoever_has_most() -> None:
    turns = Turns(16)
    turns.take(chain(1, 4), pin_s=300, tenant="idle")
    turns.now = IDLE_S
    for name in (2, 3):
        turns.take(chain(name, 6), pin_s=300, tenant="busy")
    for other in range(4, 10):
        turns.take(chain(other, 2))
    assert [len(turns.pool.match(chain(name, 6))) for name in (1, 2, 3)] == [2, 6, 6]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 4)), max_size=60))
def test_who_pins_nothing_finds_what_the_rest_of_the_blocks_would_remember(
    asks: list[tuple[bool, int, int]],
) -> None:
    both, rest = Turns(40), Turns(4)
    for lies, name, length in asks:
        if lies:
            both.take(chain(100 + name, length), pin_s=3600, tenant="liar")
            rest.take(chain(100 + name, length))
        else:
            assert both.take(chain(name, length)) >= rest.take(chain(name, length))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8), st.booleans()), max_size=40),
    st.integers(1, 8),
)
def test_a_session_that_has_ended_counts_for_nothing(
    turns: list[tuple[int, int, bool]], shared: int
) -> None:
    """Sessions of one tenant begin alike, and each goes on in its own way."""
    all_of, whose = Turns(64), dict[bytes, set[int]]()
    for session, length, ends in turns:
        hashes = hashes_of([0] * 4 * shared + [session + 1] * 4 * length)
        all_of.take(hashes, pin_s=0 if ends else 300, tenant="a", session=f"{session}")
        for block_hash in hashes:
            if not ends:
                whose.setdefault(block_hash, set()).add(session)
            elif whose.get(block_hash) == {session}:
                del whose[block_hash]
    assert all_of.pool.num_pinned == len(whose)
    for session in range(6):
        whole = hashes_of([0] * 4 * shared + [session + 1] * 4 * 8)
        all_of.pool.pin(whole, "a", 0, f"{session}")
    left = all_of.pool.num_pinned
    assert left <= shared, "what several have pinned"
    all_of.take(chain(99, 57 - left), pin_s=300, tenant="b")
    for other in range(200, 220):
        all_of.take(chain(other, 7))
    assert len(all_of.pool.match(chain(99, 57))) == 57 - left, "all others may be pinned"


def test_an_end_keeps_what_the_session_shares_with_one_that_branched_off() -> None:
    turns = Turns(16)
    trunk, branch = chain(1, 4), hashes_of([1] * 16 + [2] * 8)
    turns.take(trunk, pin_s=300, session="parent")
    turns.take(branch, pin_s=300, session="child")
    turns.take(branch, session="child")
    assert turns.pool.num_pinned == len(trunk)
    turns.take(trunk, tenant="b", session="parent")
    turns.take(trunk, session="other")
    assert turns.pool.num_pinned == len(trunk), "neither another tenant nor another session ends it"


class PoolMachine(RuleBasedStateMachine):
    """Any order of operations keeps the books straight."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = BlockPool(8, clock=lambda: self.now)
        self.held: list[list[int]] = []
        self.pool.record_changes(True)
        self.pool.only_stored.record_changes(True)
        self.told: set[bytes] = set()
        self.told_stored: set[bytes] = set()
        self.elsewhere: set[bytes] = set()

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

    @rule(
        start=st.integers(0, 2),
        tenant=st.sampled_from("ab"),
        seconds=st.sampled_from([0, 9, 300]),
        session=st.sampled_from(["", "s", "t"]),
    )
    def pin(self, start: int, tenant: str, seconds: int, session: str) -> None:
        self.pool.pin(hashes_of([start] * 32), tenant, seconds, session)

    @rule(seconds=st.integers(1, 200))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(start=st.integers(0, 2), row=st.integers(0, 7), kept=st.booleans())
    def keep_elsewhere(self, start: int, row: int, kept: bool) -> None:
        block_hash = hashes_of([start] * 32)[row]
        self.pool.kept_elsewhere(block_hash, kept=kept)
        (self.elsewhere.add if kept else self.elsewhere.discard)(block_hash)

    @rule()
    def tell(self) -> None:
        for block_hash, remembered in self.pool.take_changes().items():
            assert (block_hash in self.told) != remembered
            (self.told.add if remembered else self.told.remove)(block_hash)
        assert self.told == set(self.pool.remembered_hashes())
        for block_hash, stored in self.pool.only_stored.take_changes().items():
            assert (block_hash in self.told_stored) != stored
            (self.told_stored.add if stored else self.told_stored.remove)(block_hash)
        assert self.told_stored == set(self.pool.only_stored.remembered_hashes())
        assert self.told_stored == {name for name in self.elsewhere if not self.pool.match([name])}

    @rule()
    def forget_all(self) -> None:
        assert self.pool.forget_all() == (not any(self.held))

    @invariant()
    def books_are_straight(self) -> None:
        check_blocks(self.pool)
        assert self.pool.num_free == 8 - len({b for held in self.held for b in held})


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40)
