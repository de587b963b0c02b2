"""The wire of the chaos tests does what it is told: real sockets on real hosts."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator

import pytest
from chaos_kit.faulty_network import BLACK_HOLE, CALM, FaultyNetwork, Weather, why_no_networks
from waits import PATIENCE_S

pytestmark = pytest.mark.skipif(bool(why_no_networks()), reason=why_no_networks())


@pytest.fixture
def network() -> Iterator[FaultyNetwork]:
    with FaultyNetwork(3, random.Random(1)) as network:
        yield network


@pytest.fixture
def line(network: FaultyNetwork) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection from host 1 to host 2."""
    with network.run(2, lambda: socket.create_server((network.address(2), 0))) as listener:
        address = listener.getsockname()
        here = network.run(1, lambda: socket.create_connection(address, timeout=60))
        there, _ = listener.accept()
        there.settimeout(PATIENCE_S)
        with here, there:
            yield here, there


def test_a_calm_wire_carries_bytes(line: tuple[socket.socket, socket.socket]) -> None:
    here, there = line
    data = random.Random(2).randbytes(300_000)
    received = b""
    here.setblocking(False)
    sent = 0
    while len(received) < len(data):
        if sent < len(data):
            sent += here.send(data[sent : sent + 50_000])
        received += there.recv(100_000)
    assert received == data


def test_hosts_reach_each_other_only_by_the_wire(network: FaultyNetwork) -> None:
    with network.run(1, lambda: socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)


def test_weather_delays_loses_and_clears_up(
    network: FaultyNetwork, line: tuple[socket.socket, socket.socket]
) -> None:
    here, there = line
    network.between(1, 2, Weather(delay_s=0.15, jitter_s=0.05, loss=0.05, duplicate=0.2))
    begin = time.monotonic()
    here.send(b"slow")
    assert there.recv(10) == b"slow"
    assert time.monotonic() - begin >= 0.15
    network.between(1, 2, BLACK_HOLE, both_ways=False)
    here.send(b"lost")
    there.settimeout(0.3)
    with pytest.raises(TimeoutError):
        there.recv(10)
    network.between(1, 2, CALM)
    there.settimeout(PATIENCE_S)
    assert there.recv(10) == b"lost", "TCP tries again"


def test_a_reset_ends_a_connection_at_both_ends(
    network: FaultyNetwork, line: tuple[socket.socket, socket.socket]
) -> None:
    here, there = line
    network.between(1, 2, Weather(reset=True))
    here.send(b"anybody there?")
    for end in (here, there):
        with pytest.raises(ConnectionResetError):
            end.recv(10)
