"""Sends from a device wait for room on the host in their order, and nothing waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diptych_kv_transfer.tables.actions import SendBlocks
from diptych_kv_transfer.tables.send_room import SendRoom


def send(tag: int, blocks: int, peer: int = 0) -> SendBlocks:
    return SendBlocks(peer, "lease", tag, [range(blocks)])


def test_a_send_waits_until_those_before_it_leave_room() -> None:
    room = SendRoom(10)
    first, second, third = send(1, 6), send(2, 5), send(3, 1)
    assert room.ask(first) == [first]
    assert room.ask(second) == []
    assert room.ask(third) == [], "it would fit, but it is not its turn"
    assert room.ended(first.key) == [second, third]


def test_one_that_is_larger_than_the_room_goes_alone() -> None:
    room = SendRoom(10)
    small, huge, next_one = send(1, 1), send(2, 1000), send(3, 1)
    assert room.ask(small) == [small]
    assert room.ask(huge) == []
    assert room.ended(small.key) == [huge]
    assert room.ask(next_one) == []
    assert room.ended(huge.key) == [next_one]


def test_what_waits_for_a_peer_that_is_lost_is_never_begun() -> None:
    room = SendRoom(1)
    first, lost, other = send(1, 1), send(2, 1, peer=7), send(3, 1)
    assert room.ask(first) == [first]
    assert room.ask(lost) == room.ask(other) == []
    assert room.peer_lost(7) == []
    assert room.ended(first.key) == [other]


@given(
    st.integers(0, 10),
    st.lists(st.tuples(st.sampled_from(["ask", "end", "lose"]), st.integers(0, 12)), max_size=60),
)
def test_each_send_begins_once_in_order_and_within_the_room(
    blocks: int, steps: list[tuple[str, int]]
) -> None:
    room = SendRoom(blocks)
    begun: list[SendBlocks] = []
    running: list[SendBlocks] = []
    waiting: list[SendBlocks] = []

    def begin(ready: list[SendBlocks]) -> None:
        begun.extend(ready)
        running.extend(ready)
        assert ready == waiting[: len(ready)], "in their order"
        del waiting[: len(ready)]

    for tag, (step, number) in enumerate(steps):
        peer = number % 3
        if step == "ask":
            waiting.append(send(tag, number, peer))
            begin(room.ask(waiting[-1]))
        elif step == "end" and running:
            begin(room.ended(running.pop(number % len(running)).key))
        elif step == "lose":
            while of_peer := [each for each in running if each.peer == peer]:
                running.remove(of_peer[0])
                begin(room.ended(of_peer[0].key))
            waiting[:] = [each for each in waiting if each.peer != peer]
            begin(room.peer_lost(peer))
        assert len(running) < 2 or sum(len(each.runs[0]) for each in running) <= blocks
        assert running or not waiting, "somebody is always served"
    assert len(set(map(id, begun))) == len(begun), "each once"
