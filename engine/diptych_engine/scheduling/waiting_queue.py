"""The requests that wait for their first or next share of a step, in the order in which they get
it, and the sessions that wait for the next piece of their prompts."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from typing import Any

from diptych_engine.scheduling.request import Request
from diptych_frontend.fair_share import FairShare
from diptych_protocol import SchedulingPolicy

Lane = list[Request]
"""One tenant's requests, in the order in which they get their shares.

It is a list rather than a heap or a deque. The admission limit bounds it, so an insertion moves a
few kilobytes, and it can be read in order and from its end.
"""
Insert = Callable[[Lane, Request, bool], None]
"""Puts a request in its place in a lane. The last argument: whether it has waited its turn before,
and was preempted or is back from receiving KV."""


def make_queue(policy: SchedulingPolicy, tenants: FairShare) -> FairQueue:
    """Return an empty queue in the order of a policy, fair to tenants within it."""
    if policy == "priority":
        return FairQueue(insert_by_turn, turn_in_class, tenants)
    return FairQueue(insert_by_arrival, service, tenants)


class FairQueue:
    """A queue for each tenant. The next request is that of the tenant that was served least.

    With a single tenant it is that tenant's queue.
    """

    def __init__(self, insert: Insert, order: Callable[[Request], Any], tenants: FairShare) -> None:
        """order: a key; of the first requests of two tenants the one with the smaller
        key is next."""
        self._insert = insert
        self._order = order
        self._tenants = tenants
        self._lanes: dict[str, Lane] = {}
        """By tenant; none is empty."""
        self._size = 0

    def push(self, request: Request) -> None:
        self._insert(self._lane(request), request, False)

    def push_front(self, request: Request) -> None:
        """Add a request that has waited its turn before: see `Insert`."""
        self._insert(self._lane(request), request, True)

    def _lane(self, request: Request) -> Lane:
        """Where one more request of this tenant is to go."""
        self._size += 1
        lane = self._lanes.get(request.account.tenant)
        if lane is None:
            lane = self._lanes[request.account.tenant] = []
            self._tenants.begin_to_wait(request.account)
        return lane

    def peek(self) -> Request:
        """Return the next request. Raises `IndexError` when none waits."""
        if len(self._lanes) == 1:
            return next(iter(self._lanes.values()))[0]
        if not self._lanes:
            raise IndexError("nobody waits")
        return min((lane[0] for lane in self._lanes.values()), key=self._order)

    def remove(self, request: Request) -> None:
        """Remove a request. Raises `ValueError` if it does not wait."""
        lane = self._lanes.get(request.account.tenant)
        if lane is None:
            raise ValueError(f"request {request.request_id} does not wait")
        lane.remove(request)
        self._size -= 1
        if not lane:
            del self._lanes[request.account.tenant]
            self._tenants.cease_to_wait(request.account)

    def num_of(self, tenant: str) -> int:
        """Return the number of a tenant's requests."""
        lane = self._lanes.get(tenant)
        return 0 if lane is None else len(lane)

    def longest(self) -> Lane:
        """Return the requests of the tenant that has most here. Raises `ValueError` when none
        waits."""
        return max(self._lanes.values(), key=len)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        for lane in self._in_order():
            yield from lane

    def __reversed__(self) -> Iterator[Request]:
        for lane in reversed(self._in_order()):
            yield from reversed(lane)

    def _in_order(self) -> list[Lane]:
        return sorted(self._lanes.values(), key=lambda lane: self._order(lane[0]))


def insert_by_arrival(lane: Lane, request: Request, waited: bool) -> None:
    """First come, first served. A request that was served before comes first again.

    A request with a deadline goes before those at the end of the queue that are due later, but not
    before one without a deadline. So if all have deadlines, they are served by them, and a request
    that arrived after another was due never overtakes it.
    """
    at = 0 if waited else len(lane)
    if request.deadline_s and not waited:
        for other in reversed(lane):
            if not other.deadline_s or other.due_at <= request.due_at:
                break
            at -= 1
    lane.insert(at, request)


def insert_by_turn(lane: Lane, request: Request, waited: bool) -> None:
    """Lower priorities first; equal ones by when they are due, even if some were served before."""
    insort(lane, request, key=turn)


def turn(request: Request) -> tuple[int, float, str]:
    """The order of the priority policy: smaller is sooner. Ids are unique, so it is total."""
    return request.priority, request.due_at, request.request_id


def service(request: Request) -> float:
    """The order of tenants under `fcfs`: the least served comes first."""
    return request.account.served


def turn_in_class(request: Request) -> tuple[int, float, float, str]:
    """The order of tenants under `priority`: by urgency, then by service."""
    due = request.due_at, request.request_id
    return request.priority, request.account.served, *due


class IdleSessions:
    """Idle sessions. Each keeps its blocks and its row until other requests need them. Without its
    blocks, its tokens are computed again when the next piece of its prompt has come."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[str, Request] = {}
        """The sessions by request id, the longest idle first."""

    def add(self, session: Request) -> Request | None:
        """Add a session. Returns the one that has waited longest if there are too many now."""
        self._sessions[session.request_id] = session
        return next(iter(self._sessions.values())) if len(self) > self._limit else None

    def remove(self, session: Request) -> None:
        del self._sessions[session.request_id]

    def longest_idle(self) -> Request | None:
        """The longest idle of the sessions that still hold blocks; None: no session holds any."""
        return next((s for s in self._sessions.values() if s.block_ids), None)

    @property
    def num_rows(self) -> int:
        """Number of batch rows that these sessions hold."""
        return sum([bool(session.block_ids) for session in self._sessions.values()])

    def __len__(self) -> int:
        return len(self._sessions)
