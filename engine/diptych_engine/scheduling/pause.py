"""What a paused engine still does.

                        new requests     requests under way
    OPEN                run              run
    PAUSED_NEW          are parked       go on to their end
    PAUSED_ALL          are parked       stand still

A request is under way if it runs or holds KV. This includes one that lost its blocks to another,
since its client has some of its tokens already. Parked requests run after the pause, in the order
in which they came.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from diptych_engine.scheduling.request import Request, RequestStatus
from diptych_engine.scheduling.waiting_queue import FairQueue
from diptych_protocol import PauseMode


class PauseState(enum.Enum):
    OPEN = enum.auto()
    PAUSED_NEW = enum.auto()
    PAUSED_ALL = enum.auto()


STATE_OF_MODE: Final[dict[PauseMode, PauseState]] = {
    "abort": PauseState.PAUSED_NEW,
    "wait": PauseState.PAUSED_NEW,
    "keep": PauseState.PAUSED_ALL,
}


@dataclass(slots=True)
class PauseGate:
    """The requests that arrived during a pause."""

    state: PauseState = PauseState.OPEN
    parked: deque[Request] = field(default_factory=deque)

    @property
    def paused(self) -> bool:
        return self.state is not PauseState.OPEN

    @property
    def frozen(self) -> bool:
        """Whether nothing is computed at all."""
        return self.state is PauseState.PAUSED_ALL

    def enter(self, request: Request, waiting: FairQueue, *, front: bool = False) -> None:
        """Pass a new request on to the queue or, during a pause, keep it until the end."""
        if self.paused:
            self.parked.append(request)
        elif front:
            waiting.push_front(request)
        else:
            waiting.push(request)

    def close(self, mode: PauseMode, waiting: FairQueue) -> None:
        """Pause, or change the mode of the pause. `waiting` loses the requests that are not under
        way, if they have to wait for the end of the pause."""
        self.state = STATE_OF_MODE[mode]
        if not self.frozen:
            fresh = [request for request in waiting if not is_under_way(request)]
            for request in fresh:
                waiting.remove(request)
            self.parked.extendleft(reversed(fresh))  # they came before the pause did

    def open(self, waiting: FairQueue) -> None:
        """End the pause: parked requests join the queue."""
        self.state = PauseState.OPEN
        while self.parked:
            waiting.push(self.parked.popleft())


def is_under_way(request: Request) -> bool:
    """Whether a request's client has some output already, or it holds KV."""
    return request.status is RequestStatus.PREEMPTED or bool(request.block_ids)
