"""What engines tell of their prefixes may come late, twice, with gaps, or from a stranger's pen."""

from __future__ import annotations

import random

import pytest
from cases import each

from diptych_protocol.block_hashes import extend_block_hashes
from diptych_protocol.wire import PREFIX_KEY_BYTES, PrefixChanges
from diptych_router.engines import known_prefixes
from diptych_router.engines.known_prefixes import KnownPrefixes, keys_of

ENGINES = ("p0", "p1", "d0")
CHAIN: list[bytes] = []
extend_block_hashes(CHAIN, list(range(20)), 1, None)
KEYS = [block[:PREFIX_KEY_BYTES] for block in CHAIN]


class ToyEngine:
    """Remembers a beginning of one chain, and tells of it as a core does."""

    def __init__(self) -> None:
        self.length = 0
        self.number = 0

    def snapshot(self) -> PrefixChanges:
        return PrefixChanges(self.number, b"".join(KEYS[: self.length]), whole=True)

    def change(self, length: int) -> PrefixChanges:
        added = b"".join(KEYS[self.length : length])
        removed = b"".join(KEYS[length : self.length])
        self.length, self.number = length, self.number + 1
        return PrefixChanges(self.number, added, removed)


def cached(known: KnownPrefixes) -> list[int]:
    return [known.num_cached(name, keys_of(CHAIN)) for name in ENGINES]


@each("seed", range(20))
def test_messages_that_are_lost_doubled_or_late_leave_the_truth(seed: int) -> None:
    choices, known = random.Random(seed), KnownPrefixes()
    engines = {name: ToyEngine() for name in ENGINES}
    told: list[PrefixChanges] = []
    for name, engine in engines.items():
        known.take(name, engine.snapshot())
    for _ in range(200):
        name = choices.choice(ENGINES)
        engine = engines[name]
        change = engine.change(choices.randrange(len(CHAIN) + 1))
        told.append(change)
        fate = choices.choice(("heard", "heard", "doubled", "lost", "restarted"))
        if fate == "restarted":
            known.forget(name)
            engine.length, engine.number = 0, 0
            known.take(name, engine.snapshot())
        elif fate != "lost":
            for _ in range(1 + (fate == "doubled")):
                if not known.take(name, change):
                    known.take(name, engine.snapshot())
    for name, engine in engines.items():
        if not known.take(name, engine.change(engine.length)):
            known.take(name, engine.snapshot())
    assert cached(known) == [engine.length for engine in engines.values()]
    assert known.num_gaps > 0


def test_what_comes_before_the_answer_is_not_counted() -> None:
    engine, known = ToyEngine(), KnownPrefixes()
    assert known.take("p0", engine.change(5))
    assert cached(known) == [0, 0, 0]
    known.take("p0", engine.snapshot())
    assert cached(known) == [5, 0, 0]


@pytest.mark.parametrize("data", [b"", b"x", KEYS[0] + b"half", bytes(8), b"\xff" * 80])
def test_bytes_that_are_no_keys_harm_nothing(data: bytes) -> None:
    engine, known = ToyEngine(), KnownPrefixes()
    engine.length = 4
    known.take("p0", engine.snapshot())
    known.take("p1", PrefixChanges(0, data, data, whole=True))
    assert cached(known)[0] == 4
    assert cached(known)[1] <= 1
    known.forget("p1")
    assert cached(known) == [4, 0, 0]


def test_an_index_that_is_full_takes_no_more_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_prefixes, "MAX_BLOCKS", len(CHAIN))
    known = KnownPrefixes()
    engine = ToyEngine()
    known.take("p0", engine.change(0))
    engine.length = len(CHAIN)
    known.take("p0", engine.snapshot())
    known.take("p1", PrefixChanges(0, b"another!" * 3, whole=True))
    assert known.index.held.num_blocks == len(CHAIN)
    assert cached(known) == [len(CHAIN), 0, 0]


def test_an_engine_that_says_to_have_more_than_it_can_have_is_not_believed() -> None:
    """Others lose nothing by it, and what it says next counts only with everything."""
    engine, forger, known = ToyEngine(), ToyEngine(), KnownPrefixes()
    engine.length = forger.length = 6
    known.take("p0", engine.snapshot(), 6)
    known.take("p1", forger.snapshot(), 6)
    assert cached(known) == [6, 6, 0]
    assert known.take("p1", forger.change(20), 6)
    assert cached(known) == [6, 0, 0]
    forger.length = 4
    assert known.take("p1", forger.change(5), 6)
    assert cached(known) == [6, 0, 0]
    known.take("p1", forger.snapshot(), 6)
    assert cached(known) == [6, 5, 0]


def test_blocks_that_are_told_twice_count_once() -> None:
    engine, known = ToyEngine(), KnownPrefixes()
    engine.length = 3
    known.take("p0", engine.snapshot(), 4)
    for number in range(1, 9):
        engine.number = number
        known.take("p0", PrefixChanges(number, KEYS[number % 3]), 4)
    assert cached(known) == [3, 0, 0]


def test_too_many_adapters_are_none() -> None:
    known = KnownPrefixes()
    known.take("p0", PrefixChanges(0, whole=True, adapters={"sql": "digest"}))
    assert known.adapters("p0") == {"sql": "digest"}
    known.take("p0", PrefixChanges(1, adapters=dict.fromkeys(map(str, range(5000)), "")))
    assert not known.adapters("p0")
    assert not known.adapters("nobody")


def test_what_was_sent_is_expected_for_a_while() -> None:
    known = KnownPrefixes()
    known.expect("d0", keys_of(CHAIN[:3]))
    assert cached(known) == [0, 0, 3]
    known.index.age()
    known.index.age()
    assert cached(known) == [0, 0, 0]


def test_places_of_engines_that_are_gone_are_used_again() -> None:
    known = KnownPrefixes()
    for number in range(50):
        name = f"e{number}"
        known.take(name, PrefixChanges(0, KEYS[0], whole=True))
        assert known.num_cached(name, keys_of(CHAIN)) == 1
        known.forget(name)
    assert known._free_places == [0]
