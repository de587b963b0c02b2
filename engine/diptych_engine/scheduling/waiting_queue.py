"""The requests that wait for their first or next share of a step, in the order in which they get
it, and the sessions that wait for the next piece of their prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any

from diptych_engine.scheduling.request import Request
from diptych_frontend.fair_share import FairShare
from diptych_protocol import SchedulingPolicy


class TenantLane(ABC):
    """One tenant's requests, in the order in which they get their shares.

    It is a list rather than a heap or a deque. The admission limit bounds it, so an insertion moves
    a few kilobytes, and it can be read in order and from its end.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    @abstractmethod
    def push(self, request: Request) -> None:
        """Add a new request."""

    @abstractmethod
    def push_front(self, request: Request) -> None:
        """Add a request that has waited its turn before: preempted, or back from receiving KV."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Remove a request. Raises `ValueError` if it does not wait."""

    def peek(self) -> Request:
        """Return the next request. Raises `IndexError` when none waits."""
        return self._requests[0]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)


def make_queue(policy: SchedulingPolicy, tenants: FairShare) -> FairQueue:
    """Return an empty queue in the order of a policy, fair to tenants within it."""
    if policy == "priority":
        return FairQueue(PriorityQueue, turn_in_class, tenants)
    return FairQueue(FcfsQueue, service, tenants)


class FairQueue:
    """A queue for each tenant. The next request is that of the tenant that was served least.

    With a single tenant it is that tenant's queue.
    """

    def __init__(
        self,
        make_lane: Callable[[], TenantLane],
        order: Callable[[Request], Any],
        tenants: FairShare,
    ) -> None:
        """order: a key; of the first requests of two tenants the one with the smaller
        key is next."""
        self._make_lane = make_lane
        self._order = order
        self._tenants = tenants
        self._lanes: dict[str, TenantLane] = {}
        """By tenant; none is empty."""
        self._size = 0

    def push(self, request: Request) -> None:
        self._lane(request).push(request)

    def push_front(self, request: Request) -> None:
        self._lane(request).push_front(request)

    def _lane(self, request: Request) -> TenantLane:
        """Where one more request of this tenant is to go."""
        self._size += 1
        lane = self._lanes.get(request.account.tenant)
        if lane is None:
            lane = self._lanes[request.account.tenant] = self._make_lane()
            self._tenants.begin_to_wait(request.account)
        return lane

    def peek(self) -> Request:
        if len(self._lanes) == 1:
            return next(iter(self._lanes.values())).peek()
        if not self._lanes:
            raise IndexError("nobody waits")
        return min((lane.peek() for lane in self._lanes.values()), key=self._order)

    def remove(self, request: Request) -> None:
        lane = self._lanes.get(request.account.tenant)
        if lane is None:
            raise ValueError(f"request {request.request_id} does not wait")
        lane.remove(request)
        self._size -= 1
        if not len(lane):
            del self._lanes[request.account.tenant]
            self._tenants.cease_to_wait(request.account)

    def num_of(self, tenant: str) -> int:
        """Return the number of a tenant's requests."""
        lane = self._lanes.get(tenant)
        return 0 if lane is None else len(lane)

    def longest(self) -> TenantLane:
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

    def _in_order(self) -> list[TenantLane]:
        return sorted(self._lanes.values(), key=lambda lane: self._order(lane.peek()))


class FcfsQueue(TenantLane):
    """First come, first served. A request that was served before comes first again.

    A request with a deadline goes before those at the end of the queue that are due later, but not
    before one without a deadline. So if all have deadlines, they are served by them, and a request
    that arrived after another was due never overtakes it.
    """

    def push(self, request: Request) -> None:
        if not request.deadline_s:
            self._requests.append(request)
            return
        at = len(self._requests)
        for other in reversed(self._requests):
            if not other.deadline_s or other.due_at <= request.due_at:
                break
            at -= 1
        self._requests.insert(at, request)

    def push_front(self, request: Request) -> None:
        self._requests.insert(0, request)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)


class PriorityQueue(TenantLane):
    """Lower priorities first; equal ones by when they are due, even if some were served before."""

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=turn)

    def push_front(self, request: Request) -> None:
        self.push(request)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, turn(request), key=turn)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"request {request.request_id} does not wait")
        del self._requests[index]


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
