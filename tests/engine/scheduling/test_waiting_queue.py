"""The waiting queue: first come, first served for one tenant, and fair among several."""

from __future__ import annotations

from collections import deque

import pytest
from engine_kit.toy_engine import make_request
from hypothesis import given
from hypothesis import strategies as st

from diptych_engine.scheduling.request import Request
from diptych_engine.scheduling.waiting_queue import FairQueue, make_queue
from diptych_frontend.fair_share import FairShare
from diptych_protocol import SchedulingPolicy


def a_queue(policy: SchedulingPolicy = "fcfs") -> tuple[FairQueue, FairShare]:
    tenants = FairShare(credit=0)
    return make_queue(policy, tenants), tenants


def request(name: str, tenants: FairShare, priority: int = 0) -> Request:
    """A request of the tenant that its name begins with."""
    made = make_request(name, [1], 1, priority=priority, arrival_time=float(name[1:] or 0))
    made.account = tenants.open(name[0])
    return made


def names(queue: FairQueue, tokens: int = 0) -> list[str]:
    """Take all, each being served so many tokens."""
    taken = []
    while queue:
        first = queue.peek()
        queue.remove(first)
        first.account.served += tokens
        taken.append(first.request_id)
    return taken


moves = st.lists(st.sampled_from(["push", "push_front", "pop", "remove"]), max_size=30)


@given(moves)
def test_of_one_tenant_it_is_a_plain_queue(todo: list[str]) -> None:
    """As it is for everybody where there are no API keys."""
    (queue, tenants), plain = a_queue(), deque[Request]()
    for number, move in enumerate(todo):
        if move == "push":
            plain.append(request(f"a{number}", tenants))
            queue.push(plain[-1])
        elif move == "push_front":
            plain.appendleft(request(f"a{number}", tenants))
            queue.push_front(plain[0])
        elif plain and move == "pop":
            assert queue.peek() is plain[0]
            queue.remove(plain.popleft())
        elif plain:
            middle = plain[len(plain) // 2]
            plain.remove(middle)
            queue.remove(middle)
        assert (len(queue), list(queue), list(reversed(queue))) == (
            len(plain), list(plain), list(reversed(plain)),
        )  # fmt: skip


def test_tenants_take_turns_by_what_they_were_served() -> None:
    queue, tenants = a_queue()
    for name in ("a1", "a2", "a3", "b4", "b5"):
        queue.push(request(name, tenants))
    assert names(queue, tokens=10) == ["a1", "b4", "a2", "b5", "a3"]


def test_urgency_comes_before_fairness_and_fairness_before_arrival() -> None:
    queue, tenants = a_queue("priority")
    asked = [("a1", 0), ("a2", 0), ("a3", -1), ("b4", 0), ("b5", 1), ("a6", -1)]
    for name, priority in asked:
        queue.push(request(name, tenants, priority))
    assert names(queue, tokens=10) == ["a3", "a6", "b4", "a1", "a2", "b5"]


def test_who_does_not_wait_cannot_be_removed() -> None:
    queue, tenants = a_queue()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"does not wait|not in list"):
            queue.remove(request("a1", tenants))
        queue.push(request("a2", tenants))
    with pytest.raises(ValueError, match="does not wait"):
        queue.remove(request("b1", tenants))
    assert len(queue) == 2
    with pytest.raises(IndexError):
        a_queue()[0].peek()


def test_its_order_is_that_of_turns_and_its_end_the_newest_of_who_had_most() -> None:
    queue, tenants = a_queue()
    for name in ("a1", "b2", "a3", "b4", "c5"):
        queue.push(request(name, tenants))
    tenants.open("a").served = 5
    tenants.open("b").served = 9
    assert [r.request_id for r in queue] == ["c5", "a1", "a3", "b2", "b4"]
    assert [r.request_id for r in reversed(queue)] == ["b4", "b2", "a3", "a1", "c5"]
    assert (queue.num_of("a"), queue.num_of("z"), len(queue.longest())) == (2, 0, 2)


def due(name: str, arrival: float, deadline_s: float, priority: int = 0) -> Request:
    """A request of one tenant."""
    return make_request(
        name, [1], 1, arrival_time=arrival, deadline_s=deadline_s, priority=priority
    )


@pytest.mark.parametrize(
    ("policy", "pushed", "wanted"),
    [
        ("fcfs", [("a", 5, 1), ("b", 2, 1), ("c", 3, 1)], "bca"),
        ("fcfs", [("a", 1, 9), ("b", 2, 1)], "ba"),
        ("fcfs", [("a", 1, 9), ("b", 1, 9)], "ab"),
        # Who has no deadline is due, and nobody passes him.
        ("fcfs", [("a", 5, 1), ("b", 6, 0), ("c", 2, 1)], "abc"),
        ("fcfs", [("a", 5, 0), ("b", 2, 0)], "ab"),
        ("priority", [("a", 5, 1), ("b", 2, 1), ("c", 1, 9)], "bac"),
        ("priority", [("a", 5, 0), ("b", 2, 0)], "ba"),
    ],
)
def test_of_one_tenant_who_is_due_first_is_first(
    policy: SchedulingPolicy, pushed: list[tuple[str, float, float]], wanted: str
) -> None:
    queue, _ = a_queue(policy)
    for name, arrival, deadline_s in pushed:
        queue.push(due(name, arrival, deadline_s))
    assert "".join(names(queue)) == wanted


def test_priority_comes_before_a_deadline() -> None:
    queue, _ = a_queue("priority")
    for name, deadline_s, priority in (("a", 1, 0), ("b", 9, -1), ("c", 2, 0)):
        queue.push(due(name, 0.0, deadline_s, priority))
    assert names(queue) == ["b", "a", "c"]


def test_who_was_served_before_is_first_whenever_others_are_due() -> None:
    queue, _ = a_queue()
    queue.push(due("a", 0.0, 1.0))
    queue.push_front(due("b", 5.0, 9.0))
    queue.push(due("c", 0.0, 0.5))
    assert names(queue)[0] in "bc"


@given(
    st.lists(st.tuples(st.floats(0, 2), st.sampled_from([0.0, 0.5, 1.0, 5.0])), max_size=40),
    st.sampled_from(["fcfs", "priority"]),
)
def test_a_deadline_comes_nearer_so_nobody_starves(
    waits: list[tuple[float, float]], policy: SchedulingPolicy
) -> None:
    """Who comes after another one was due is not served before him, however many come."""
    queue, _ = a_queue(policy)
    requests, now = [], 0.0
    for number, (pause, deadline_s) in enumerate(waits):
        now += pause
        requests.append(due(f"{number:03}", now, deadline_s))
        queue.push(requests[-1])
    order = {name: place for place, name in enumerate(names(queue))}
    for first in requests:
        for later in requests:
            if later.arrival_time > first.due_at:
                assert order[first.request_id] < order[later.request_id]
