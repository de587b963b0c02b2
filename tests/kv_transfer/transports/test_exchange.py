"""What a transfer's other side may say, and the two ways in which blocks move."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from diptych_kv_transfer.memory.shard import MemoryRegion
from diptych_kv_transfer.signing.references import PUBLIC_KEY
from diptych_kv_transfer.tables.actions import TransferEnded
from diptych_kv_transfer.transports.ucx import frames, same_host, ucx_transfer
from diptych_kv_transfer.transports.ucx.exchange import (
    MAX_UNCLAIMED_OFFERS,
    MAX_UNCLAIMED_RUNS,
    Exchange,
    ExchangeError,
)
from diptych_kv_transfer.transports.ucx.frames import AnyFrame, Introduction, Moved, Offer, Send
from diptych_kv_transfer.transports.ucx.libucp import FEATURE_TAG, UcpError
from diptych_kv_transfer.transports.ucx.same_host import (
    BYTES_AT_ONCE,
    RUNS_AT_ONCE,
    OtherProcess,
    Reading,
    SameHost,
    may_read,
    network_transports,
)
from diptych_kv_transfer.transports.ucx.ucx_transfer import PIECE_BYTES, UcxTransfer
from diptych_kv_transfer.transports.ucx.ucx_transport import UcxTransport
from diptych_kv_transfer.transports.ucx.worker import Context, Worker
from diptych_protocol import UNREADABLE


@pytest.fixture(scope="module")
def here() -> Iterator[SameHost]:
    host = SameHost()
    yield host
    host.close()


class Loop:
    """A UCX worker that is connected to itself."""

    def __init__(self) -> None:
        self.context = Context({}, FEATURE_TAG)
        self.worker = Worker(self.context)
        self.endpoint = self.worker.reach(self.worker.address)

    def finish(self, *transfers: UcxTransfer) -> None:
        while not all(one.ended for one in transfers):
            self.worker.progress()

    def close(self) -> None:
        self.endpoint.close()
        self.worker.close()
        self.context.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


Said = list[AnyFrame]
Ends = tuple[Exchange, Said]


@pytest.fixture(params=["read", "sent"])
def receiver(request: pytest.FixtureRequest, here: SameHost, loop: Loop) -> Iterator[Ends]:
    """Who connected to this very process, what it says; blocks will be read by it or sent to it."""
    said: Said = []
    exchange = Exchange(loop.endpoint, loop.worker, here, said.append, accepted=False)
    if request.param == "read":
        exchange.handle(here.introduction)
    yield exchange, said
    loop.finish(*exchange.abandon())


@pytest.fixture
def sender(here: SameHost, loop: Loop) -> Iterator[Ends]:
    """Who was connected to, and has introduced itself."""
    said: Said = []
    exchange = Exchange(loop.endpoint, loop.worker, here, said.append, accepted=True)
    assert said == [here.introduction]
    said.clear()
    yield exchange, said
    loop.finish(*exchange.abandon())


def region(array: np.ndarray) -> MemoryRegion:
    return MemoryRegion.of(array)


def offer(tag: int, array: np.ndarray) -> Offer:
    return Offer(tag, [(array.ctypes.data, array.nbytes)])


def test_what_is_offered_arrives_and_both_sides_know(
    receiver: Ends, sender: Ends, loop: Loop
) -> None:
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    (to, asked), (of, offered) = receiver, sender
    to.receive("in", 1, [region(target)])
    assert not to.busy
    of.send("out", 1, [region(source)])
    to.handle(offered.pop())
    ended: list[TransferEnded] = []
    while len(ended) < 2:
        ended += to.advance()
        while asked:
            of.handle(asked.pop())
        loop.worker.progress()
        ended += of.advance()
    assert set(ended) == {TransferEnded("in", ok=True), TransferEnded("out", ok=True)}
    assert np.array_equal(source, target)
    assert not to.busy


@pytest.mark.parametrize(
    "frame",
    [Send(1, 0), Moved(1, ok=True), Send(3, 0), Introduction("h", b"a", b"k", 1, bytes(16))],
    ids=["send what was not offered", "read it", "send twice", "introduce itself"],
)
def test_a_receiver_that_breaks_the_protocol_is_refused(
    sender: Ends, loop: Loop, frame: AnyFrame
) -> None:
    exchange, _ = sender
    exchange.send("out", 3, [region(np.zeros(10, np.uint8))])
    exchange.handle(Send(3, 1 << 40))
    with pytest.raises(ExchangeError):
        exchange.handle(frame)
    taken = np.zeros(10, np.uint8)
    loop.finish(ucx_transfer.receive(loop.worker.handle, [region(taken)], 1 << 40))


def test_a_sender_that_offers_twice_is_refused(receiver: Ends) -> None:
    exchange, _ = receiver
    block = np.zeros(10, np.uint8)
    exchange.receive("in", 3, [region(block)])
    exchange.handle(offer(3, block))
    with pytest.raises(ExchangeError):
        exchange.handle(offer(3, block))


def test_a_sender_that_introduces_itself_twice_is_refused(here: SameHost, loop: Loop) -> None:
    exchange = Exchange(loop.endpoint, loop.worker, here, lambda frame: None, accepted=False)
    exchange.handle(here.introduction)
    with pytest.raises(ExchangeError):
        exchange.handle(here.introduction)
    exchange.abandon()


def test_offers_that_nobody_asked_for_are_bounded(receiver: Ends) -> None:
    exchange, _ = receiver
    for tag in range(MAX_UNCLAIMED_OFFERS):
        exchange.handle(Offer(tag, []))
    with pytest.raises(ExchangeError):
        exchange.handle(Offer(MAX_UNCLAIMED_OFFERS, []))


def test_runs_of_offers_that_nobody_asked_for_are_bounded(receiver: Ends) -> None:
    exchange, _ = receiver
    run = (1, 1)
    exchange.handle(Offer(0, [run] * (MAX_UNCLAIMED_RUNS - 1)))
    exchange.handle(Offer(1, [run]))
    with pytest.raises(ExchangeError, match="too many"):
        exchange.handle(Offer(2, [run]))


def test_two_transfers_under_one_tag_are_refused(receiver: Ends, sender: Ends) -> None:
    """Else the first receive would be forgotten, and still be written to."""
    block = np.zeros(10, np.uint8)
    receiver[0].receive("in", 3, [region(block)])
    with pytest.raises(ExchangeError, match="one tag"):
        receiver[0].receive("other", 3, [region(block)])
    sender[0].send("out", 3, [region(block)])
    with pytest.raises(ExchangeError, match="one tag"):
        sender[0].send("other", 3, [region(block)])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"\x93\xa5Offer\x01",
        frames.encode(5),
        frames.encode(Introduction("hh", b"a", b"k", 1, bytes(16))).replace(b"hh", b"\xff\xfe"),
        b"\x93\xa5Offer\x01" + b"\x91" * 100_000,
    ],
    ids=["nothing", "no frame", "half a frame", "a number", "not UTF-8", "deep lists"],
)
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    with pytest.raises(UNREADABLE):
        frames.decode(data)


def test_what_cannot_be_read_is_sent(here: SameHost, loop: Loop) -> None:
    said: Said = []
    exchange = Exchange(loop.endpoint, loop.worker, here, said.append, accepted=False)
    exchange.handle(here.introduction)
    source, targets = np.full(10, 7, np.uint8), np.zeros((2, 10), np.uint8)
    exchange.receive("first", 1, [region(targets[0])])
    exchange.receive("second", 2, [region(targets[1])])
    exchange.handle(Offer(1, [(4096, 10)]))  # nothing is mapped there
    exchange.handle(offer(2, source))
    ended = exchange.advance()
    assert not exchange.busy
    going = []
    for frame in said:
        assert isinstance(frame, Send)
        going.append(ucx_transfer.send(loop.endpoint.handle, [region(source)], frame.first))
    loop.finish(*going)
    while len(ended) < 2:
        loop.worker.progress()
        ended += exchange.advance()
    assert ended == [TransferEnded("first", ok=True), TransferEnded("second", ok=True)]
    assert (targets == 7).all()


def test_reading_goes_in_bounded_steps_and_ends_exact(here: SameHost) -> None:
    lengths = [1, 0, BYTES_AT_ONCE * 2 + 17, *([3] * (RUNS_AT_ONCE + 5))]
    source = np.random.default_rng(1).integers(1, 256, sum(lengths), np.uint8)
    target = np.zeros_like(source)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).tolist()
    spans = [(source.ctypes.data + at, n) for at, n in zip(starts, lengths, strict=True)]
    process = here.meet(here.introduction)
    assert process is not None
    reading = Reading(process, spans, [target.ctypes.data + at for at in starts])
    steps = 0
    while not reading.done:
        before = int(np.count_nonzero(target))
        reading.advance()
        assert np.count_nonzero(target) - before <= BYTES_AT_ONCE + same_host.RUN_BYTES
        steps += 1
    assert steps >= 4
    assert np.array_equal(source, target)
    process.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [("host", "elsewhere"), ("probe", bytes(16)), ("probe_address", 4096)],
)
def test_only_a_process_that_proves_itself_is_read(
    here: SameHost, field: str, value: object
) -> None:
    assert isinstance(here.meet(here.introduction), OtherProcess)
    assert here.meet(msgspec.structs.replace(here.introduction, **{field: value})) is None


def test_a_process_that_was_killed_is_read_no_more_and_harms_nobody(here: SameHost) -> None:
    script = (
        "import sys; from diptych_kv_transfer.transports.ucx import frames, same_host\n"
        "here = same_host.SameHost()\n"
        "print(frames.encode(here.introduction).hex(), flush=True)\n"
        "sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        introduction = frames.decode(bytes.fromhex(other.stdout.readline()))
        assert isinstance(introduction, Introduction)
        process = here.meet(introduction)
        assert process is not None
        target = np.zeros(16, np.uint8)
        spans = [(introduction.probe_address, 16)]
        Reading(process, spans, [target.ctypes.data]).advance()
        assert target.tobytes() == introduction.probe
        other.kill()
        other.wait()
        with pytest.raises(UcpError):
            Reading(process, spans, [target.ctypes.data]).advance()
        process.close()


@pytest.mark.parametrize(
    "lengths", [[], [0], [1, 0, 3], [PIECE_BYTES], [PIECE_BYTES + 1, 5], [3 * PIECE_BYTES] * 2]
)
def test_runs_of_any_size_pass_in_pieces(loop: Loop, lengths: list[int]) -> None:
    source = np.random.default_rng(2).integers(1, 256, sum(lengths), np.uint8)
    target = np.zeros_like(source)
    starts = np.cumsum([0, *lengths])[:-1].tolist()
    first = 7 << ucx_transfer.TAG_BITS

    def runs(array: np.ndarray) -> list[MemoryRegion]:
        return [region(array).part(at, length) for at, length in zip(starts, lengths, strict=True)]

    coming = ucx_transfer.receive(loop.worker.handle, runs(target), first)
    going = ucx_transfer.send(loop.endpoint.handle, runs(source), first)
    loop.finish(coming, going)
    assert coming.ok
    assert going.ok
    assert np.array_equal(source, target)


@pytest.mark.parametrize(("sent", "ok"), [(10, True), (9, False), (11, False)])
def test_a_piece_of_another_size_is_no_piece(loop: Loop, sent: int, ok: bool) -> None:
    source, target = np.ones(16, np.uint8), np.zeros(16, np.uint8)
    coming = ucx_transfer.receive(loop.worker.handle, [region(target[:10])], 5)
    loop.finish(coming, ucx_transfer.send(loop.endpoint.handle, [region(source[:sent])], 5))
    assert coming.ok is ok
    assert not target[10:].any()


def test_a_receive_that_is_called_off_ends_and_touches_nothing(loop: Loop) -> None:
    source, target = np.ones(16, np.uint8), np.zeros(16, np.uint8)
    coming = ucx_transfer.receive(loop.worker.handle, [region(target)], 6)
    assert not coming.ended
    coming.cancel(loop.worker.handle)
    loop.finish(coming)
    assert not coming.ok
    going = ucx_transfer.send(loop.endpoint.handle, [region(source)], 6)
    taken = np.zeros(16, np.uint8)
    loop.finish(going, ucx_transfer.receive(loop.worker.handle, [region(taken)], 6))
    assert not target.any()
    assert taken.all()


def test_a_key_that_is_none_is_refused(here: SameHost) -> None:
    bad = msgspec.structs.replace(here.introduction, address=b"\x00")
    assert here.meet(bad) is None


@pytest.mark.parametrize(
    ("value", "read", "network"),
    [(None, True, "^sm"), ("all", True, "^sm"), ("tcp", False, "tcp"),
     ("tcp,self,cuda_copy", False, "cuda_copy,self,tcp"), ("shm,tcp,self", True, "self,tcp"),
     ("cma,tcp", True, "tcp"), ("^cma", False, "^cma,sm"), ("^ib", True, "^ib,sm")],
)  # fmt: skip
def test_ucx_tls_says_how_blocks_travel(
    value: str | None, read: bool, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    if value is not None:
        monkeypatch.setenv("UCX_TLS", value)
    assert may_read() is read
    assert network_transports() == network


@pytest.mark.parametrize("name", ["rc_x", "nonsense"])
def test_a_transport_that_is_not_here_is_named_with_the_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", name)
    with pytest.raises(OSError, match=rf"UCX_TLS={name}\b.* or unset it; spec.transfer"):
        UcxTransport("127.0.0.1", 0, PUBLIC_KEY)


def test_ucx_tls_must_name_something_that_leaves_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "cma,posix")
    with pytest.raises(OSError, match="add tcp"):
        network_transports()
