"""What a transfer's other side may say, and reading the memory of another process."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from diptych_kv_transfer import frames
from diptych_kv_transfer.events import TransferEnded
from diptych_kv_transfer.exchange import MAX_UNCLAIMED_OFFERS, Exchange, ExchangeError, Means
from diptych_kv_transfer.frames import AnyFrame, Introduction, Moved, Offer, PutInto
from diptych_kv_transfer.same_host import (
    MAX_BYTES_AT_ONCE,
    MAX_VECTORS,
    Reading,
    address_of,
    can_read,
    is_allowed,
    this_process,
)
from diptych_kv_transfer.sockets import Door

ME = this_process()


Said = list[AnyFrame]


@pytest.fixture
def pair() -> Iterator[tuple[Exchange, Said]]:
    """An exchange with a process of this host, but without a connection, and what it says."""
    said: Said = []
    with select.epoll() as epoll:
        door = Door("127.0.0.1", epoll)
        means = Means(ME, True, door, epoll, None)
        exchange = Exchange(0, means, ("127.0.0.1", 1), said.append)
        exchange.handle(Introduction(ME, 1, bytes(16)))
        said.clear()
        yield exchange, said
        exchange.abandon()
        door.close()


def offer(tag: int, array: np.ndarray) -> Offer:
    return Offer(tag, [(address_of(array), array.nbytes)])


def test_the_receiver_reads_what_is_offered_and_says_so(pair: tuple[Exchange, Said]) -> None:
    exchange, said = pair
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    exchange.receive("key", 1, [target])
    assert not exchange.busy
    exchange.handle(offer(1, source))
    assert exchange.busy
    assert exchange.advance() == [TransferEnded("key", ok=True)]
    assert said == [Moved(1, ok=True)]
    assert np.array_equal(source, target)
    assert not exchange.busy


@pytest.mark.parametrize(
    "frame",
    [
        PutInto(1, [(4096, 0)], [b"key"]),
        PutInto(2, [(4096, 1)], [b"key"]),
        PutInto(2, [], [b"key"]),
        PutInto(2, [(4096, 0)] * 2, [b"key"]),
        Moved(1, ok=True),
        Moved(3, ok=True),
    ],
    ids=["not offered", "no such key", "too few", "too many", "not asked for", "being read"],
)
def test_a_peer_that_breaks_the_protocol_is_refused(
    pair: tuple[Exchange, Said], frame: AnyFrame
) -> None:
    exchange, _ = pair
    block = np.zeros(10, np.uint8)
    exchange.send("out", 2, [block])
    exchange.receive("in", 3, [block])
    exchange.handle(offer(3, block))
    with pytest.raises(ExchangeError):
        exchange.handle(frame)


def test_offers_that_nobody_asked_for_are_bounded(pair: tuple[Exchange, Said]) -> None:
    exchange, _ = pair
    for tag in range(MAX_UNCLAIMED_OFFERS):
        exchange.handle(Offer(tag, []))
    with pytest.raises(ExchangeError):
        exchange.handle(Offer(MAX_UNCLAIMED_OFFERS, []))


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x93\xa5Offer\x01", frames.encode(5)])
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        frames.decode(data)


def test_a_source_that_is_gone_fails_one_transfer(pair: tuple[Exchange, Said]) -> None:
    exchange, said = pair
    target = np.zeros(10, np.uint8)
    exchange.receive("key", 1, [target])
    exchange.handle(Offer(1, [(4096, 10)]))  # nothing is mapped there
    assert exchange.advance() == [TransferEnded("key", ok=False)]
    assert said == [Moved(1, ok=False)]


def test_reading_goes_in_bounded_pieces_and_ends_exact() -> None:
    lengths = [1, 0, MAX_BYTES_AT_ONCE * 2 + 17, *([3] * (MAX_VECTORS + 5))]
    source = np.random.default_rng(1).integers(0, 256, sum(lengths), np.uint8)
    target = np.zeros_like(source)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).tolist()
    spans = [(address_of(source) + at, n) for at, n in zip(starts, lengths, strict=True)]
    reading = Reading(os.getpid(), spans, [address_of(target) + at for at in starts])
    calls = 0
    while not reading.done:
        before = int(np.count_nonzero(target))
        reading.advance()
        assert np.count_nonzero(target) - before <= MAX_BYTES_AT_ONCE
        calls += 1
    assert calls >= 4
    assert np.array_equal(source, target)


@pytest.mark.parametrize(
    ("field", "value"),
    [("host", "elsewhere"), ("probe", bytes(16)), ("pid", (1 << 31) - 1), ("probe_address", 4096)],
)
def test_only_a_process_that_proves_itself_is_read(field: str, value: object) -> None:
    assert can_read(ME, ME)
    assert not can_read(msgspec.structs.replace(ME, **{field: value}), ME)


@pytest.mark.parametrize(
    ("value", "allowed"),
    [(None, True), ("all", True), ("tcp", False), ("tcp,self,cuda_copy", False),
     ("shm,tcp,self", True), ("cma,tcp", True), ("^cma", False), ("^ib", True)],
)  # fmt: skip
def test_ucx_tls_says_whether_memory_is_read_directly(
    value: str | None, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    if value is not None:
        monkeypatch.setenv("UCX_TLS", value)
    assert is_allowed() is allowed
