"""Free ports of this machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from diptych.laptop.ports import free_ports, is_free, lasting_ports


def test_each_run_is_of_neighbours_and_no_port_is_given_twice() -> None:
    found = free_ports([3, 1, 2, 3])
    assert len(set(found)) == len(found) == 9
    for begin, length in ((0, 3), (3, 1), (4, 2), (6, 3)):
        run = found[begin : begin + length]
        assert run == [*range(run[0], run[0] + length)]
    assert all(map(is_free, found)), "they are free again"


def test_ports_that_somebody_else_will_take_are_not_given() -> None:
    found = free_ports([1] * 50, besides=range(0, 65536, 2))
    assert {port % 2 for port in found} == {1}


@pytest.mark.parametrize("host", ["203.0.113.1", "fe80::1"])
def test_an_address_of_another_machine_is_not_said_to_be_in_use(host: str) -> None:
    with pytest.raises(OSError, match=r"assign|argument|support"):
        is_free(0, host)


def test_more_neighbours_than_there_are_is_an_error() -> None:
    with pytest.raises(OSError, match="no 70000 ports are free that are neighbours"):
        free_ports([70000])


def test_a_run_with_a_port_that_somebody_has_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, other = free_ports([1, 2])[:2]
    tried = iter([taken - 1, taken, other])
    monkeypatch.setattr("diptych.laptop.ports.random.choice", lambda ports: next(tried))
    with socket.socket() as held:
        held.bind(("127.0.0.1", taken))
        held.listen()
        assert free_ports([2]) == [other, other + 1]


@pytest.mark.parametrize(
    ("local", "found"),
    [
        ("32768\t60999\n", range(20_000, 30_000)),
        ("25000 60999", range(20_000, 25_000)),
        ("1024 65535", range(20_000, 65_536)),
        ("", range(20_000, 30_000)),
        ("none", range(20_000, 30_000)),
    ],
)
def test_ports_are_not_those_that_connections_may_get(local: str, found: range) -> None:
    assert lasting_ports(local) == found


def test_a_port_is_found_below_those_of_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first < 22_000:
        pytest.skip("this machine gives nearly all ports to connections")
    assert all(port < first for port in free_ports([3] * 20))
