"""Connections over UCX that prove nothing, or are tampered with: cut off, in time and in number."""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil
import pytest
from waits import Deadline, source_of

from diptych_kv_transfer.connector import key_of, with_literals
from diptych_kv_transfer.signing.handshake import Session
from diptych_kv_transfer.signing.references import PUBLIC_KEY, HingeKey
from diptych_kv_transfer.tables.actions import Connected, ConnectFailed, Event, PeerLost, Received
from diptych_kv_transfer.transports.ucx import loiterers, requests, ucx_transport
from diptych_kv_transfer.transports.ucx.libucp import IN_PROGRESS
from diptych_kv_transfer.transports.ucx.loiterers import Loiterers
from diptych_kv_transfer.transports.ucx.stream import MESSAGE
from diptych_kv_transfer.transports.ucx.ucx_transport import UcxTransport
from diptych_protocol import CurveKeys, InvalidRequestError, KVTransferConfig

LOOPBACK = "127.0.0.1"
KEYS = CurveKeys("P" * 40, "S" * 40)
KEY = HingeKey.of(KEYS)


class End:
    """A transport and what has happened to it."""

    def __init__(self, key: HingeKey, host: str) -> None:
        self.transport = UcxTransport(host, 0, key)
        self.events: list[Event] = []

    def connect(self, other: End) -> None:
        self.transport.connect(("127.0.0.1", other.transport.port))

    def turn(self) -> None:
        self.events += self.transport.poll(0.001)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


Make = Callable[..., End]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def end(host: str = "127.0.0.1", key: HingeKey = KEY) -> End:
            made = End(key, host)
            stack.callback(made.transport.close)
            # It has met itself, and may still have the end of that.
            until(lambda: num_accepted(made.transport.port) == 0, made)
            return made

        yield end


def until(condition: Callable[[], object], *ends: End) -> None:
    deadline = Deadline(source_of(condition))
    while not condition():
        deadline.check()
        for end in ends:
            end.turn()


def test_who_has_another_key_is_nobody_on_either_side(make: Make) -> None:
    """Neither side's owner hears of the other, and both go on with others."""
    ours, foreign, friend = make(), make(key=PUBLIC_KEY), make()
    foreign.connect(ours)
    ours.connect(foreign)
    until(lambda: foreign.of(ConnectFailed) and ours.of(ConnectFailed), ours, foreign)
    friend.connect(ours)
    until(lambda: friend.of(Connected) and ours.of(Connected), ours, friend, foreign)
    assert not foreign.of(Connected)
    assert len(ours.of(Connected)) == 1
    assert not ours.of(PeerLost)
    until(lambda: len(ours.transport._connections) == 1, ours, foreign, friend)


def test_messages_that_nobody_waits_for_are_not_kept(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From who is connected and has proven nothing: UCX itself would keep them all."""
    ours, flood, friend = make(), make(), make()
    monkeypatch.setattr(flood.transport, "_shake", lambda *_: None)
    flood.connect(ours)
    until(lambda: ours.transport._connections and flood.transport._connections, ours, flood)
    [connection] = flood.transport._connections.values()
    message = np.zeros(8 << 10, np.uint8)
    before = 0
    for number in range(400):
        if number == 100:  # by now UCX and the allocator have what they need
            before = psutil.Process().memory_info().rss
        sent = [
            requests.tag_send(connection.endpoint.handle, message.ctypes.data, 8 << 10, number)
            for _ in range(64)
        ]
        until(
            lambda sent=sent: all(requests.status_of(x) != IN_PROGRESS for x in sent),  # type: ignore[misc]
            flood,
            ours,
        )
        for request in sent:
            requests.free(request)
    grown = psutil.Process().memory_info().rss - before
    assert grown < 75 << 20, "half of the 150 MiB that were sent"
    friend.connect(ours)
    until(lambda: friend.of(Connected), ours, friend)


def test_who_says_nothing_is_cut_off_in_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, silent = make(), make()
    monkeypatch.setattr(silent.transport, "_shake", lambda *_: None)
    begin = time.monotonic()
    with monkeypatch.context() as short:  # the other end has all the time
        short.setattr(ucx_transport, "HANDSHAKE_TIMEOUT_S", 0.2)
        ours.connect(silent)  # it is connected to, and does not answer
    until(lambda: ours.of(ConnectFailed), ours, silent)
    assert time.monotonic() - begin >= 0.2
    assert "in time" in ours.of(ConnectFailed)[0].reason
    until(lambda: not ours.transport._connections, ours, silent)


def test_a_poll_that_waits_wakes_up_to_cut_somebody_off(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would end the wait."""
    ours, silent = make(), make()
    monkeypatch.setattr(silent.transport, "_shake", lambda *_: None)
    with monkeypatch.context() as short:
        short.setattr(ucx_transport, "HANDSHAKE_TIMEOUT_S", 0.2)
        ours.connect(silent)
    until(lambda: silent.transport._connections or ours.of(ConnectFailed), ours, silent)
    deadline = Deadline("a connection that failed")
    while not ours.of(ConnectFailed):
        deadline.check()
        ours.events += ours.transport.poll(None)


def test_strangers_are_few_and_keep_nobody_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_transport, "MAX_STRANGERS", 3)
    ours, crowd, friend = make(), make(), make()
    monkeypatch.setattr(crowd.transport, "_shake", lambda *_: None)  # they never prove anything
    for _ in range(8):
        crowd.connect(ours)
        until(lambda: ours.transport._connections, ours, crowd)
    until(lambda: len(crowd.of(ConnectFailed)) >= 5, ours, crowd)
    until(lambda: len(ours.transport._connections) <= 3, ours, crowd)
    friend.connect(ours)
    until(lambda: ours.of(Connected) and friend.of(Connected), ours, crowd, friend)


@pytest.mark.parametrize("sent", [b"", b"\1", bytes(9), b"x" * 5000], ids=["", "1", "9", "5000"])
@pytest.mark.parametrize("then", ["stays", "closes", "resets"])
def test_who_never_asks_for_a_connection_is_cut_off_in_time(
    make: Make, monkeypatch: pytest.MonkeyPatch, sent: bytes, then: str
) -> None:
    """UCX reads no more than a request, and would look at the rest for ever. Who is connected
    stays."""
    monkeypatch.setattr(ucx_transport, "LOOK_S", 0.05)
    ours, friend = make(), make()
    friend.connect(ours)
    until(lambda: ours.of(Connected) and friend.of(Connected), ours, friend)
    port = ours.transport.port
    ours.transport._loiterers = Loiterers(port, 0.1, 64)
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((LOOPBACK, port)))]
        strangers.append(stack.enter_context(socket.create_connection((LOOPBACK, port))))
        for stranger in strangers:
            stranger.sendall(sent)
        until(lambda: num_accepted(port) == 3)
        for stranger in strangers if then != "stays" else []:
            if then == "resets":
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.close()
        until(lambda: num_accepted(port) == 1, ours, friend)
        [peer] = [event.peer for event in friend.of(Connected)]
        friend.transport.send(peer, b"still here")
        until(lambda: ours.of(Received), ours, friend)
        assert not ours.of(PeerLost)


def test_who_sends_more_than_ucx_reads_is_cut_off_at_the_second_look(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then a thread of UCX never rests. Who sends less, or nothing, has its time."""
    monkeypatch.setattr(ucx_transport, "LOOK_S", 0.05)
    ours, friend = make(), make()
    port = ours.transport.port
    ours.transport._loiterers = Loiterers(port, 3600.0, 64)
    with ExitStack() as stack:
        for sent in (b"", b"\1", b"x" * 5000, b"y" * 70000):
            stranger = stack.enter_context(socket.create_connection((LOOPBACK, port)))
            stranger.sendall(sent)
        until(lambda: num_accepted(port) == 4)
        until(lambda: num_accepted(port) == 2, ours)
        friend.connect(ours)
        until(lambda: ours.of(Connected) and friend.of(Connected), ours, friend)


@pytest.mark.parametrize("resets", [False, True], ids=["is cut off", "resets"])
def test_the_error_of_who_has_gone_is_left_to_ucx_however_often_we_look(resets: bool) -> None:
    """It is told once, to whoever reads, and UCX closes no socket without it."""
    with (
        socket.create_server((LOOPBACK, 0)) as listener,
        socket.create_connection(listener.getsockname()) as stranger,
        listener.accept()[0] as accepted,
    ):
        loiterers = Loiterers(listener.getsockname()[1], 3600.0, 64)
        stranger.sendall(b"" if resets else b"x")
        if resets:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.close()
        for now in range(4):
            loiterers.cut_off(set(), now)
        with pytest.raises(ConnectionResetError):
            accepted.recv(1)


def test_those_who_never_ask_for_a_connection_are_few(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx_transport, "LOOK_S", 0.05)
    ours = make()
    port = ours.transport.port
    ours.transport._loiterers = Loiterers(port, 3600.0, 3)
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(socket.create_connection((LOOPBACK, port)))
        until(lambda: num_accepted(port) > 3, ours)
        until(lambda: num_accepted(port) == 3, ours)


def num_accepted(port: int) -> int:
    """How many sockets of this process others have connected to at this port."""
    return sum(1 for _ in loiterers._accepted_at(port))


@pytest.mark.parametrize("damage", ["edited", "repeated", "left out", "unproven"])
def test_a_record_that_somebody_has_touched_cuts_the_connection(make: Make, damage: str) -> None:
    ours, theirs = make(), make()
    ours.connect(theirs)
    until(lambda: ours.of(Connected) and theirs.of(Connected), ours, theirs)
    [peer] = [event.peer for event in ours.of(Connected)]
    stream = ours.transport._connections[peer].stream
    session = stream.session
    assert isinstance(session, Session)
    ours.transport.send(peer, b"good")
    until(lambda: theirs.of(Received), ours, theirs)
    record = session.seal(MESSAGE, b"not so good")
    match damage:
        case "edited":
            record = b"N" + record[1:]
        case "repeated":
            stream._append(MESSAGE, record)
        case "left out":
            record = session.seal(MESSAGE, b"the next one")
        case "unproven":
            record = b"as before there were keys"
    stream._append(MESSAGE, record)
    until(lambda: theirs.of(PeerLost) and ours.of(PeerLost), ours, theirs)
    said = [event.data for event in theirs.of(Received)]
    assert said == [b"good", b"not so good"] if damage == "repeated" else said == [b"good"]


@pytest.mark.parametrize(
    ("listens", "reached_at", "is_open"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("127.0.0.2", "127.0.0.2", True),
        ("0.0.0.0", "127.0.0.2", True),
    ],
)
def test_a_port_is_open_at_its_own_address_alone(
    make: Make, listens: str, reached_at: str, is_open: bool
) -> None:
    ours = make(listens)
    with socket.socket() as other:
        answer = other.connect_ex((reached_at, ours.transport.port))
    assert answer == (0 if is_open else errno.ECONNREFUSED)


def test_on_loopback_no_port_is_open_to_other_hosts(make: Make) -> None:
    """UCX opens further ports, on each device that it may use."""
    before = open_ports()
    make("127.0.0.1")
    opened = open_ports() - before
    assert len(opened) >= 2
    assert {host for host, _ in opened} == {"127.0.0.1"}


def open_ports() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", ["::1", "::", "fe80::1%lo"])
def test_ipv6_is_refused_because_ucx_would_crash(make: Make, host: str) -> None:
    with pytest.raises(OSError, match="UCX moves KV over IPv4 only"):
        UcxTransport(host, 0, PUBLIC_KEY)
    ours = make()
    ours.transport.connect((host, 1))
    [event] = ours.transport.poll(0)
    assert isinstance(event, ConnectFailed)
    assert "IPv4" in event.reason


@pytest.mark.parametrize("host", ["localhost", "no.such.name", "127.1", ""])
def test_names_are_not_looked_up(make: Make, host: str) -> None:
    ours = make()
    ours.transport.connect((host, 1))
    event = ours.transport.poll(0)[0]
    assert isinstance(event, ConnectFailed)
    assert "not an IP address" in event.reason


def test_an_engine_advertises_an_address() -> None:
    config = with_literals(KVTransferConfig(advertise_host="localhost"))
    assert config.advertise_host in ("127.0.0.1", "::1")
    assert with_literals(KVTransferConfig(advertise_host="10.1.2.3")).advertise_host == "10.1.2.3"
    assert with_literals(KVTransferConfig()).advertise_host == "127.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::"])
def test_without_keys_an_engine_listens_on_loopback_only(host: str) -> None:
    config = KVTransferConfig(listen_host=host)
    with pytest.raises(InvalidRequestError, match="--keys") as caught:
        key_of(config, None)
    assert caught.value.param == "keys"
    assert key_of(KVTransferConfig(), None) is PUBLIC_KEY
    assert key_of(config, KEYS).mac(b"a", b"b") == KEY.mac(b"a", b"b")
