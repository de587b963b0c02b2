"""What a core tells of its prefixes and a router makes of it, over a line that does anything."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from chaos_kit.bad_news import BadNews, Mischief

from diptych_frontend.core_client.prefix_news import REPEAT_S, PrefixNews
from diptych_protocol.block_hashes import FIRST_DIGEST, next_digest
from diptych_protocol.wire import PREFIX_KEY_BYTES, PrefixChanges
from diptych_router.engines.known_prefixes import (
    MAX_IN_VAIN,
    MAX_REPEATS,
    KnownPrefixes,
    keys_of,
)

BLOCKS = [bytes([number]) * PREFIX_KEY_BYTES for number in range(1, 25)]
SOME = Mischief(lose=0.2, double=0.2, delay=0.2, forge=0.3)


@dataclass
class ToyPool:
    """Remembers some blocks, and what changed of them since somebody asked."""

    held: set[bytes] = field(default_factory=set)
    changes: dict[bytes, bool] = field(default_factory=dict)

    def record_changes(self, wanted: bool) -> None:
        self.changes = {}

    def remembered_hashes(self) -> list[bytes]:
        return sorted(self.held)

    def take_changes(self) -> dict[bytes, bool]:
        changes, self.changes = self.changes, {}
        return changes

    def turn(self, block: bytes) -> None:
        """Forget a block, or remember it."""
        self.held ^= {block}
        if self.changes.pop(block, None) is None:
            self.changes[block] = block in self.held


@dataclass
class Link:
    key: str


class World:
    """Two cores, a line that may be bad, and what a router knows."""

    def __init__(self) -> None:
        self.known = KnownPrefixes()
        self.pools = {name: ToyPool() for name in ("p0", "d0")}
        self.disks = {name: ToyPool() for name in self.pools}
        """What is on disk only."""
        self.cores = {
            name: PrefixNews(cast(Any, pool), dict, cast(Any, self.disks[name]))
            for name, pool in self.pools.items()
        }
        self.asked: list[str] = list(self.cores)
        self.line = BadNews()
        self.line.attach(cast(Any, self))
        self.now = 0.0

    def take_prefixes(self, link: Link, changes: PrefixChanges) -> None:
        if not self.known.take(link.key, changes, len(BLOCKS)):
            self.asked.append(link.key)

    def tell(self) -> None:
        """Each core tells what is new, and answers who asked."""
        for name, core in self.cores.items():
            news = core.take(self.now, at_once=True)
            if news is not None:
                self.line.take(cast(Any, Link(name)), news)
        asked, self.asked = self.asked, []
        for name in asked:
            whole = self.cores[name].follow(b"router")
            assert whole is not None
            self.line.take(cast(Any, Link(name)), whole)

    def known_of(self, name: str, *, stored: bool = False) -> list[bytes]:
        index, place = self.known.index, self.known.place(name)
        holders = index.only_stored if stored else index.held
        found = (holders.runs(keys_of([block]))[0][1] >> place & 1 for block in BLOCKS)
        return [block for block, held in zip(BLOCKS, found, strict=True) if held]


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(n, marks=pytest.mark.slow) for n in range(20, 60))]
)
def test_a_router_learns_the_truth_from_cores_that_have_nothing_new_to_tell(seed: int) -> None:
    """Whichever message was lost or forged: also the last one, and the answer to a question."""
    world, choices = World(), random.Random(seed)
    world.line.begin(SOME, choices)
    for _ in range(60):
        world.now += choices.choice([0.01, REPEAT_S])
        pools = choices.choice([world.pools, world.disks])
        pools[choices.choice(["p0", "d0"])].turn(choices.choice(BLOCKS))
        world.tell()
    world.line.end()
    gaps = []
    for _ in range(2 * MAX_REPEATS):
        world.now += REPEAT_S
        world.tell()
        gaps.append(world.known.num_gaps)
    for name, pool in world.pools.items():
        assert world.known_of(name) == sorted(pool.held)
        assert world.known_of(name, stored=True) == sorted(world.disks[name].held)
    assert world.known.index.held.num_blocks == len(
        set.union(*(x.held for x in world.pools.values()))
    )
    assert not world.asked
    assert gaps[-1] == gaps[MAX_REPEATS], "and asks no more"


def test_a_calm_line_needs_no_second_question() -> None:
    world = World()
    for number in range(40):
        world.now += 0.3
        world.pools["p0"].turn(BLOCKS[number % 7])
        world.tell()
    assert world.known_of("p0") == sorted(world.pools["p0"].held)
    assert world.known.num_gaps == 0


def test_a_message_with_the_next_number_that_the_core_did_not_send_is_noticed() -> None:
    known = KnownPrefixes()
    first = next_digest(FIRST_DIGEST, BLOCKS[0], b"")
    known.take("p0", PrefixChanges(4, BLOCKS[0], whole=True, digest=first))
    assert not known.take("p0", PrefixChanges(5, BLOCKS[1], digest=first))
    assert known.index.held.num_blocks == 0
    assert known.num_gaps == 1


def test_an_answer_with_other_blocks_than_the_core_has_is_noticed() -> None:
    """Whoever sends it knows the number and the digest of the moment."""
    known = KnownPrefixes()
    digest = next_digest(FIRST_DIGEST, BLOCKS[0], b"")
    for _ in range(2):
        known.take("p0", PrefixChanges(4, BLOCKS[0], whole=True, digest=digest))
        assert known.index.held.num_blocks == 1
        known.take("p0", PrefixChanges(4, BLOCKS[1], whole=True, digest=digest))
        assert known.index.held.num_blocks == 0


@pytest.mark.parametrize(
    ("news", "times"),
    [(b"", 2 * MAX_IN_VAIN // MAX_REPEATS), (BLOCKS[1], 2)],
    ids=["at rest", "at work"],
)
def test_an_engine_whose_answers_are_never_right_is_asked_now_and_then(
    news: bytes, times: int
) -> None:
    known = KnownPrefixes()
    for number in range(2 * MAX_IN_VAIN):
        assert known.take("p0", PrefixChanges(number, BLOCKS[0], whole=True, digest=7))
    took = [known.take("p0", PrefixChanges(n, news, digest=7)) for n in range(2 * MAX_IN_VAIN)]
    assert took.count(False) == times


def test_an_adapter_that_an_engine_at_rest_loads_is_known() -> None:
    known = KnownPrefixes()
    known.take("p0", PrefixChanges(4, BLOCKS[0], whole=True))
    assert known.take("p0", PrefixChanges(4, adapters={"sql": "digest"}))
    assert known.adapters("p0") == {"sql": "digest"}


def test_an_engine_that_says_to_have_more_on_disk_than_it_can_is_not_believed() -> None:
    known = KnownPrefixes()
    known.take("p0", PrefixChanges(0, BLOCKS[0], whole=True, to_disk=BLOCKS[0]), 2)
    assert known.index.only_stored.num_blocks == 1
    known.take("p0", PrefixChanges(1, to_disk=b"".join(BLOCKS[1:3])), 2)
    assert known.index.only_stored.num_blocks == known.index.held.num_blocks == 0
    assert not known.has_told("p0")


def test_what_an_engine_will_have_is_no_prefix_to_fetch() -> None:
    known = KnownPrefixes()
    place = known.place("p0")
    known.take("p0", PrefixChanges(0, whole=True))
    names = b"".join(BLOCKS[:3])
    assert known.take("p0", PrefixChanges(0, expected=[names, names + BLOCKS[0], b"", b"odd"]))
    found = known.index.match(keys_of(BLOCKS[:4]))
    assert found.now == []
    assert found.soon == [(3, 1 << place)]
    known.index.age()
    known.index.age()
    assert known.index.match(keys_of(BLOCKS[:4])).soon == []
