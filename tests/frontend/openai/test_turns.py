"""Turns of clients: nobody waits for more than one item of each other client."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych_frontend.openai.request_workers import MAX_WAITING_BYTES, SMALL_BYTES, Turns
from diptych_protocol import EngineOverloadedError


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), max_size=40))
def test_each_client_is_served_in_its_order_and_once_a_round(puts: list[tuple[str, int]]) -> None:
    turns: Turns[int] = Turns(max_bytes=1000)
    for number, (client, size) in enumerate(puts):
        turns.put(client, number, size)
    taken = [turns.take() for _ in puts]
    assert turns.take() is None
    assert len(turns) == 0
    for client in "abc":
        mine = [item for item in taken if item is not None and item[0] == client]
        assert mine == sorted(mine)
    waiting = {client: sum(put[0] == client for put in puts) for client in "abc"}
    while any(waiting.values()):
        present = {client for client, count in waiting.items() if count}
        one_round = {item[0] for item in taken[: len(present)] if item is not None}
        assert one_round == present
        taken = taken[len(present) :]
        for client in present:
            waiting[client] -= 1


def test_one_client_has_half_of_the_room_and_room_comes_back() -> None:
    turns: Turns[int] = Turns(8 * SMALL_BYTES)
    for number in range(4):
        turns.put("a", number, SMALL_BYTES)
    with pytest.raises(EngineOverloadedError, match="of this client"):
        turns.put("a", 4, 1)
    assert turns.take() == ("a", 0)
    turns.put("a", 4, SMALL_BYTES)
    taken = [turns.take() for _ in range(5)]
    assert taken == [("a", 1), ("a", 2), ("a", 3), ("a", 4), None]


def test_others_large_items_keep_no_small_one_out() -> None:
    turns: Turns[str] = Turns(8 * SMALL_BYTES)
    for client in "ab":
        turns.put(client, client, 4 * SMALL_BYTES)
    with pytest.raises(EngineOverloadedError, match="too many large requests wait"):
        turns.put("c", "large", SMALL_BYTES + 1)
    turns.put("c", "small", SMALL_BYTES)
    assert [turns.take() for _ in range(3)] == [("a", "a"), ("b", "b"), ("c", "small")]


def test_who_has_a_turn_already_waits_while_others_go_on() -> None:
    turns: Turns[int] = Turns(1000)
    for client, number in (("a", 1), ("a", 2), ("b", 3)):
        turns.put(client, number, 1)
    assert turns.take(without={"a"}) == ("b", 3)
    assert turns.take(without={"a"}) is None
    assert turns.take() == ("a", 1)


def test_many_ordinary_requests_of_one_client_wait() -> None:
    """An evaluation sends a thousand conversations of some kilobytes at once."""
    turns: Turns[int] = Turns(MAX_WAITING_BYTES)
    for number in range(1000):
        turns.put("a", number, 8 << 10)
    assert len(turns) == 1000
