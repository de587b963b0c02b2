"""The requests that wait for their first or next share of a step, in the order they get it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from diptych_engine.request import Request
from diptych_protocol import SchedulingPolicy


class WaitingQueue(Protocol):
    """What the scheduler needs of a queue, whatever its order."""

    def push(self, request: Request) -> None:
        """A new request."""

    def push_front(self, request: Request) -> None:
        """One that has waited its turn before: preempted, or back from the hinge."""

    def peek(self) -> Request:
        """The request whose turn is next. Raises `IndexError` when none waits."""

    def pop(self) -> Request:
        """Take the request whose turn is next. Raises `IndexError` when none waits."""

    def remove(self, request: Request) -> None:
        """Raises `ValueError` for a request that does not wait."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def __reversed__(self) -> Iterator[Request]: ...


def make_queue(policy: SchedulingPolicy) -> WaitingQueue:
    """An empty queue in the order of a policy."""
    return PriorityQueue() if policy == "priority" else FcfsQueue()


class FcfsQueue:
    """First come, first served; who was served before comes first again."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def push(self, request: Request) -> None:
        self._requests.append(request)

    def push_front(self, request: Request) -> None:
        self._requests.appendleft(request)

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)


class PriorityQueue:
    """Lower priorities first, equal ones by arrival, whoever was served before.

    A sorted list rather than a heap: it is bounded by the admission limit, at which an insertion
    moves a few kilobytes, and it can be walked in order and from its end.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=turn)

    def push_front(self, request: Request) -> None:
        self.push(request)

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.pop(0)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, turn(request), key=turn)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"request {request.request_id} does not wait")
        del self._requests[index]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)


def turn(request: Request) -> tuple[int, float, str]:
    """The order of the priority policy: smaller is sooner. Ids are unique, so it is total."""
    return request.priority, request.arrival_time, request.request_id
