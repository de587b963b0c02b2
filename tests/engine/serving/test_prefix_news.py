"""A core tells those who follow it which blocks it remembers: all of them, and then each change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
from engine_kit.core import core_request, make_core, run
from engine_kit.wire import ADD, UTILITY, Client, request, start
from waits import PATIENCE_S

from diptych_frontend.core_client import prefix_news
from diptych_frontend.core_client.prefix_news import PrefixNews
from diptych_protocol import UtilityCall
from diptych_protocol.block_hashes import FIRST_DIGEST, next_digest
from diptych_protocol.wire import FOLLOW_PREFIXES, PREFIX_KEY_BYTES, PrefixChanges

Keys = set[bytes]


def keys_of(data: bytes) -> list[bytes]:
    return [data[at : at + PREFIX_KEY_BYTES] for at in range(0, len(data), PREFIX_KEY_BYTES)]


@dataclass
class Follower:
    """Knows what a core remembers by what it is told alone."""

    held: Keys = field(default_factory=set)
    stored: Keys = field(default_factory=set)
    """Those of them that are on disk only."""
    number: int = -1

    def take(self, news: PrefixChanges) -> None:
        added, removed = keys_of(news.added), keys_of(news.removed)
        to_disk, from_disk = keys_of(news.to_disk), keys_of(news.from_disk)
        assert len(set(added + removed)) == len(added) + len(removed), "each is told once"
        if news.whole:
            self.held, self.stored, self.number = set(), set(), news.number - 1
        anything = news.whole or added or removed or to_disk or from_disk
        assert news.number == self.number + bool(anything)
        self.number = news.number
        assert not self.held & set(added)
        assert self.held >= set(removed)
        self.held = (self.held | set(added)) - set(removed)
        assert news.digest == next_digest(FIRST_DIGEST, b"".join(self.held), b"")
        assert not self.stored & set(to_disk)
        assert self.stored >= set(from_disk)
        self.stored = (self.stored | set(to_disk)) - set(from_disk)
        assert self.stored <= self.held
        assert news.disk_digest == next_digest(FIRST_DIGEST, b"".join(self.stored), b"")


def test_followers_know_what_the_pool_remembers() -> None:
    """Whatever is computed, forgotten and computed again between two messages, and whatever can be
    read back meanwhile."""
    core, choices = make_core(num_blocks=16), random.Random(5)
    pool = core.scheduler.pool
    news = PrefixNews(pool, core.adapters.digests, pool.only_stored)
    early, late = Follower(), Follower()
    first = news.follow(b"early")
    assert first is not None
    early.take(first)
    prompts = [[seed] * 70 for seed in range(6)]
    for turn in range(30):
        run(core, core_request(f"r{turn}", choices.choice(prompts), max_tokens=2))
        if turn == 12:
            core.call("reset_prefix_cache", [])
        for block_hash in sorted(pool.remembered_hashes()):
            if choices.random() < 0.3:
                pool.kept_elsewhere(block_hash, kept=choices.random() < 0.7)
        if choices.random() < 0.7:
            changes = news.take(float(turn), at_once=True)
            for follower in (early, late)[: 2 if late.number >= 0 else 1]:
                if changes is not None:
                    follower.take(changes)
        if turn == 20:
            if (changes := news.take(float(turn), at_once=True)) is not None:
                early.take(changes)
            whole = news.follow(b"late")
            assert whole is not None
            late.take(whole)
    if (changes := news.take(99.0, at_once=True)) is not None:
        early.take(changes)
        late.take(changes)
    for source, told in (
        (pool, (early.held, late.held)),
        (pool.only_stored, (early.stored, late.stored)),
    ):
        remembered = {key[:PREFIX_KEY_BYTES] for key in source.remembered_hashes()}
        assert remembered
        assert told == (remembered, remembered)


def test_nothing_is_noted_for_nobody() -> None:
    core = make_core()
    news = PrefixNews(core.scheduler.pool, core.adapters.digests)
    news.follow(b"a")
    news.forget(b"a")
    news.forget(b"a")
    run(core, core_request("r", [1] * 40, max_tokens=1))
    assert core.scheduler.pool.take_changes() == {}
    assert news.take(0.0, at_once=True) is None


def test_a_client_hears_of_no_prompt_that_came_while_others_followed() -> None:
    news = PrefixNews(make_core().scheduler.pool, dict)
    news.follow(b"a")
    news.expect([b"block"])
    news.forget(b"a")
    news.follow(b"b")
    told = news.take(0.0, at_once=True)
    assert told is not None
    assert told.expected == []


def test_changes_wait_for_each_other_while_there_is_work() -> None:
    core = make_core()
    news = PrefixNews(core.scheduler.pool, core.adapters.digests)
    news.follow(b"a")
    run(core, core_request("s", [2] * 40, max_tokens=1))
    assert news.take(1.0, at_once=False) is not None
    run(core, core_request("t", [3] * 40, max_tokens=1))
    assert news.take(1.0 + prefix_news.INTERVAL_S / 2, at_once=False) is None
    assert news.take(1.0 + prefix_news.INTERVAL_S, at_once=False) is not None


def test_the_number_of_followers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_news, "MAX_FOLLOWERS", 2)
    news = PrefixNews(make_core().scheduler.pool, dict)
    assert [news.follow(name) is not None for name in (b"a", b"b", b"c", b"a")] == [
        True, True, False, True,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = f"ipc://{tmp_path_factory.mktemp('core')}/core"
    process = start(path)
    yield path
    process.terminate()
    assert process.wait(PATIENCE_S) == 0


def follow(client: Client) -> None:
    call = UtilityCall(0, -1, FOLLOW_PREFIXES, [])
    client.send(UTILITY, msgspec.msgpack.encode(call))


def news_from(client: Client) -> PrefixChanges:
    while (news := client.receive().prefix_changes) is None:
        pass
    return news


def test_a_client_is_told_over_its_socket_also_of_what_others_computed(endpoint: str) -> None:
    watching, asking = Follower(), Follower()
    watcher, asker = Client(endpoint), Client(endpoint)
    follow(watcher)
    watching.take(news_from(watcher))
    before = len(watching.held)
    asker.send(ADD, msgspec.msgpack.encode(request("r", [9] * 40)))
    asker.read("r")
    while len(watching.held) < before + 2:
        watching.take(news_from(watcher))
    follow(asker)
    asking.take(news_from(asker))
    assert asking.held == watching.held
    assert asking.number == watching.number
    for client in (watcher, asker):
        client.socket.close()


def test_other_routers_hear_of_a_prompt_before_it_is_computed(endpoint: str) -> None:
    clients = [Client(endpoint) for _ in range(2)]
    followers = [Follower() for _ in clients]
    for client, follower in zip(clients, followers, strict=True):
        follow(client)
        follower.take(news_from(client))
    clients[0].send(ADD, msgspec.msgpack.encode(request("e", [13] * 40)))
    for client, follower in zip(clients, followers, strict=True):
        while not (news := news_from(client)).expected:
            follower.take(news)
        [names] = map(keys_of, news.expected)
        assert len(names) == 2
        assert not follower.held & set(names)
        while not follower.held >= set(names):
            follower.take(news)
            news = news_from(client) if not follower.held >= set(names) else news
    for client in clients:
        client.socket.close()


def test_who_follows_twice_is_told_everything_twice_and_each_change_once(endpoint: str) -> None:
    client, follower = Client(endpoint), Follower()
    for _ in range(2):
        follow(client)
        follower.take(news_from(client))
    assert client.call("describe")["num_blocks"] == 64, "and nothing stands between"
    client.socket.close()
