"""What every transport must do, over each way that blocks can travel; both ends are processes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from waits import FOR_EVER_S, PATIENCE_S, Deadline, source_of

from diptych_kv_transfer.memory.shard import MemoryRegion
from diptych_kv_transfer.signing.references import PUBLIC_KEY
from diptych_kv_transfer.tables.actions import (
    Connected,
    ConnectFailed,
    Event,
    PeerLost,
    Received,
    TransferEnded,
)
from diptych_kv_transfer.transports import TRANSPORTS, transport_named
from diptych_kv_transfer.transports.ucx import ucx_transport

SEED = 21
"""Fills the other process's memory (see transport_process.py), which then holds no zeros."""
MIB = 1 << 20
MEMORY_BYTES = 64 * MIB
SCRIPT = Path(__file__).with_name("transport_process.py")
E = TypeVar("E", bound=Event)
Spans = list[tuple[int, int]]

Way = tuple[str, str]
"""A transport, and the name of one of its ways."""
WAYS: dict[str, dict[str, dict[str, str]]] = {
    "ucx": {"cma": {"UCX_TLS": "all"}, "tcp": {"UCX_TLS": "tcp"}},
}
"""By transport and way: the variables of the environment that choose it."""
ALL_WAYS: list[Way] = [(transport, way) for transport in WAYS for way in WAYS[transport]]

SHAPES: dict[str, Spans] = {
    "nothing": [],
    "one byte": [(5, 1)],
    "one of no bytes": [(7, 0)],
    "some of no bytes": [(0, 0), (10, 20), (40, 0), (50, 3)],
    "one block of 64 KiB": [(65536, 65536)],
    "blocks of 720 KiB": [(i * 2 * 720 * 1024, 720 * 1024) for i in range(16)],
    "backwards": [(i * 8192, 4096) for i in reversed(range(64))],
    "many small": [(i * 8192 + 3, 4097) for i in range(3000)],
    "one huge": [(0, MEMORY_BYTES)],
}


class Other:
    """The process at the other end, and our memory of the same size."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), transport, str(MEMORY_BYTES)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Ours:
    """Our end."""

    def __init__(self, other: Other) -> None:
        self.memory = np.zeros(MEMORY_BYTES, np.uint8)
        self.transport = transport_named(other.transport)("127.0.0.1", 0, PUBLIC_KEY)
        self.events: list[Event] = []
        self.tags = itertools.count(1 << 40)
        self.peer = self.connect(other.port)

    def connect(self, port: int) -> int:
        self.transport.connect(("127.0.0.1", port))
        return self.expect(Connected).peer

    def expect(self, kind: type[E], timeout_s: float = PATIENCE_S) -> E:
        """The next event of a kind."""
        deadline = Deadline(f"a {kind.__name__}", timeout_s)
        while not any(isinstance(event, kind) for event in self.events):
            deadline.check()
            self.events += self.transport.poll(deadline.left_s)
        found = next(event for event in self.events if isinstance(event, kind))
        self.events.remove(found)
        return found

    def tell(self, do: str, **arguments: Any) -> None:
        self.transport.send(self.peer, json.dumps({"do": do, **arguments}).encode())

    def ask(self) -> Any:
        """What the other process says of itself."""
        self.tell("status")
        return self.answer()

    def answer(self) -> Any:
        return json.loads(self.expect(Received).data)

    def regions(self, spans: Spans) -> list[MemoryRegion]:
        whole = MemoryRegion.of(self.memory)
        return [whole.part(at, length) for at, length in spans]

    def receive(self, spans: Spans) -> int:
        """Have spans of the other's memory sent into the same ones of ours."""
        tag = next(self.tags)
        self.transport.receive_blocks(self.peer, f"r{tag}", tag, self.regions(spans))
        self.tell("send", tag=tag, spans=spans)
        return tag


@pytest.fixture(params=ALL_WAYS, ids="-".join, scope="module")
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    transport, name = request.param
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in WAYS[transport][name].items():
            patch.setenv(variable, value)
        yield request.param


@pytest.fixture(scope="module")
def lasting(way: Way) -> Iterator[Other]:
    """A process that survives a test."""
    other = Other(way[0])
    yield other
    other.kill()


@pytest.fixture
def mortal(way: Way) -> Iterator[Other]:
    """A process that a test may stop or kill."""
    other = Other(way[0])
    yield other
    other.kill()


def test_every_transport_is_under_test() -> None:
    assert set(WAYS) == set(TRANSPORTS)


@pytest.fixture
def ours(lasting: Other) -> Iterator[Ours]:
    end = Ours(lasting)
    yield end
    end.transport.close()


@pytest.fixture(scope="module")
def theirs() -> np.ndarray:
    """What the other process has in its memory."""
    return np.random.default_rng(SEED).integers(1, 256, MEMORY_BYTES, np.uint8)


def copied(source: np.ndarray, spans: Spans) -> np.ndarray:
    """Spans of an array, and zeros around them."""
    result = np.zeros_like(source)
    for at, length in spans:
        result[at : at + length] = source[at : at + length]
    return result


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_arrive_as_they_were_and_nothing_else_is_touched(
    ours: Ours, theirs: np.ndarray, way: Way, shape: str
) -> None:
    tag = ours.receive(SHAPES[shape])
    assert ours.expect(TransferEnded) == TransferEnded(f"r{tag}", ok=True)
    assert np.array_equal(ours.memory, copied(theirs, SHAPES[shape]))
    assert ours.answer()["ended"]
    assert ours.transport.name == way[1]
    assert ours.ask()["name"] == way[1]


def test_an_end_that_met_itself_too_late_takes_itself_for_nobody_else(
    lasting: Other, theirs: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx_transport, "MEETING_TIMEOUT_S", 0.0)
    end = Ours(lasting)
    try:
        end.receive([(0, 1000)])
        assert end.expect(TransferEnded).ok
        assert np.array_equal(end.memory[:1000], theirs[:1000])
    finally:
        end.transport.close()


def test_an_offer_waits_for_its_receive(ours: Ours, theirs: np.ndarray) -> None:
    spans: Spans = [(0, 4096), (8192, 4096)]
    ours.tell("send", tag=77, spans=spans)
    ours.ask()  # the offer has come before this answer
    ours.transport.receive_blocks(ours.peer, "late", 77, ours.regions(spans))
    assert ours.expect(TransferEnded) == TransferEnded("late", ok=True)
    assert np.array_equal(ours.memory, copied(theirs, spans))


def test_blocks_go_both_ways(mortal: Other) -> None:
    """Who connects is not read: it is sent from through the connection."""
    ours = Ours(mortal)
    try:
        ours.memory[:] = 9
        ours.transport.send_blocks(ours.peer, "out", 5, ours.regions([(0, 4096)]))
        ours.tell("receive", tag=5, spans=[(8, 4096)])
        assert ours.expect(TransferEnded) == TransferEnded("out", ok=True)
        assert ours.answer()["ended"]
        ours.receive([(0, 8192)])
        assert ours.expect(TransferEnded).ok
        assert np.count_nonzero(ours.memory[:8192] == 9) >= 4096
        assert (ours.memory[8:4104] == 9).all()
    finally:
        ours.transport.close()


@pytest.mark.parametrize("sent", [[(0, 4096)], [(0, 4096), (8192, 4095)], [(0, 4096)] * 3])
def test_blocks_of_other_sizes_than_asked_for_are_refused_on_both_sides(
    ours: Ours, sent: Spans
) -> None:
    ours.transport.receive_blocks(ours.peer, "r", 9, ours.regions([(0, 4096), (8192, 4096)]))
    ours.tell("send", tag=9, spans=sent)
    assert ours.expect(TransferEnded) == TransferEnded("r", ok=False)
    assert not ours.answer()["ended"]
    assert not ours.memory.any()
    ours.receive([(0, 4096)])
    assert ours.expect(TransferEnded).ok, "the connection must live on"


def test_a_fence_ends_every_transfer_before_it_reports_the_loss(ours: Ours, lasting: Other) -> None:
    """Some have not begun, some are under way; nothing is written once the loss is known."""
    tags = [ours.receive([(i * 8 * MIB, 8 * MIB)]) for i in range(8)]
    ours.transport.receive_blocks(ours.peer, "never sent", 3, ours.regions([(0, 1)]))
    ours.transport.send_blocks(ours.peer, "never fetched", 4, ours.regions([(0, 1)]))
    wait_until(lambda: bool(ours.memory.any()), ours)
    ours.transport.fence(ours.peer)
    ours.expect(PeerLost)
    seen = [event for event in ours.events if isinstance(event, TransferEnded)]
    expected = {*(f"r{tag}" for tag in tags), "never sent", "never fetched"}
    assert {event.key for event in seen} == expected
    assert [event.key for event in seen if str(event.key).startswith("never") and event.ok] == []
    before = ours.memory.copy()
    ours.peer = ours.connect(lasting.port)
    assert ours.ask()
    assert np.array_equal(ours.memory, before)


def wait_until(done: Callable[[], bool], ours: Ours) -> None:
    deadline = Deadline(source_of(done))
    while not done():
        deadline.check()
        ours.events += ours.transport.poll(0.0)


def test_a_peer_killed_in_mid_transfer_is_lost_and_its_transfers_have_ended(
    mortal: Other,
) -> None:
    ours = Ours(mortal)
    try:
        tags = [ours.receive([(i * 8 * MIB, 8 * MIB)]) for i in range(8)]
        ours.transport.receive_blocks(ours.peer, "never sent", 3, ours.regions([(0, 1)]))
        wait_until(lambda: bool(ours.memory.any()), ours)
        mortal.kill()
        ours.expect(PeerLost)
        ended = {event.key for event in ours.events if isinstance(event, TransferEnded)}
        assert ended == {*(f"r{tag}" for tag in tags), "never sent"}
    finally:
        ours.transport.close()


def test_a_stopped_peer_holds_up_nobody_and_cannot_write_after_its_fence(
    mortal: Other, lasting: Other, theirs: np.ndarray
) -> None:
    ours = Ours(mortal)
    try:
        ours.receive([(0, MEMORY_BYTES // 2)])
        wait_until(lambda: bool(ours.memory.any()), ours)
        os.kill(mortal.process.pid, signal.SIGSTOP)
        ours.transport.receive_blocks(ours.peer, "stuck", 3, ours.regions([(0, 1)]))
        stopped, ours.peer = ours.peer, ours.connect(lasting.port)
        spans: Spans = [(MEMORY_BYTES // 2, 4 * MIB)]
        tag = ours.receive(spans)
        wait_until(lambda: TransferEnded(f"r{tag}", ok=True) in ours.events, ours)
        ours.transport.fence(stopped)
        ours.expect(PeerLost)
        assert TransferEnded("stuck", ok=False) in ours.events
        ours.memory[: MEMORY_BYTES // 2] = 0
        os.kill(mortal.process.pid, signal.SIGCONT)
        ours.peer = ours.connect(mortal.port)  # so it runs again
        assert ours.ask()
        assert np.array_equal(ours.memory, copied(theirs, spans))
    finally:
        ours.transport.close()


def test_an_idle_connection_costs_no_cpu(ours: Ours) -> None:
    ours.receive([(0, 4096)])
    assert ours.expect(TransferEnded).ok
    ours.answer()
    theirs_before, before = ours.ask()["cpu"], time.process_time()
    assert ours.transport.poll(1.0) == []
    assert time.process_time() - before < 0.2, "who looks again and again takes most of a processor"
    assert ours.ask()["cpu"] - theirs_before < 0.2


def test_another_thread_ends_a_wait(ours: Ours) -> None:
    ours.transport.wake()
    ours.transport.poll(FOR_EVER_S)


def test_what_is_asked_of_a_lost_peer_fails(ours: Ours) -> None:
    ours.transport.fence(ours.peer)
    ours.expect(PeerLost)
    ours.transport.send(ours.peer, b"dropped")
    ours.transport.send_blocks(ours.peer, "s", 1, ours.regions([(0, 1)]))
    ours.transport.receive_blocks(ours.peer, "r", 2, ours.regions([(0, 1)]))
    ours.transport.fence(ours.peer)
    assert set(ours.transport.poll(0.0)) == {TransferEnded("s", False), TransferEnded("r", False)}


def test_a_port_where_nobody_listens_ends_in_a_report(ours: Ours) -> None:
    ours.transport.connect(("127.0.0.1", 1))
    deadline = Deadline("a report")
    while not any(isinstance(event, ConnectFailed | PeerLost) for event in ours.events):
        deadline.check()
        ours.events += ours.transport.poll(1.0)
