"""Turns of clients: nobody waits for more than one item of each other client."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych_frontend.openai.turns import Turns
from diptych_protocol import EngineOverloadedError


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), max_size=40))
def test_each_client_is_served_in_its_order_and_once_a_round(puts: list[tuple[str, int]]) -> None:
    turns: Turns[tuple[str, int]] = Turns(max_of_one=100, max_bytes=1000)
    for number, (client, size) in enumerate(puts):
        turns.put(client, (client, number), size)
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


def test_too_much_is_refused_and_room_comes_back() -> None:
    turns: Turns[int] = Turns(max_of_one=2, max_bytes=10)
    turns.put("a", 1, 4)
    turns.put("a", 2, 4)
    with pytest.raises(EngineOverloadedError, match="2 large requests of this client"):
        turns.put("a", 3, 1)
    with pytest.raises(EngineOverloadedError, match="too many large requests"):
        turns.put("b", 4, 3)
    assert turns.take() == 1
    turns.put("b", 4, 3)
    assert [turns.take(), turns.take()] == [2, 4]
