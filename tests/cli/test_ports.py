"""Free ports of this machine."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from diptych.laptop.ports import free_ports, is_free


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


def test_more_neighbours_than_there_are_is_an_error() -> None:
    with pytest.raises(OSError, match="no 70000 ports are free that are neighbours"):
        free_ports([70000])


def test_a_run_goes_round_a_port_that_somebody_has() -> None:
    with ExitStack() as held:
        taken = held.enter_context(socket.socket())
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert taken.getsockname()[1] not in free_ports([2] * 50)
