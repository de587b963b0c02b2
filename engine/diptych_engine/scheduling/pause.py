"""What a paused engine still does. Pure.

                        new requests     requests under way
    OPEN                run              run
    PAUSED_NEW          are parked       go on to their end
    PAUSED_ALL          are parked       stand still

Under way is what runs or holds KV: a request that lost its blocks to another one included, since it
has told its client some of its tokens already. Parked requests run after the pause, in the order in
which they came.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from diptych_engine.scheduling.request import Request, RequestStatus
from diptych_engine.scheduling.waiting_queue import WaitingQueue
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
    """Where requests wait that came during a pause."""

    state: PauseState = PauseState.OPEN
    parked: deque[Request] = field(default_factory=deque)

    @property
    def paused(self) -> bool:
        return self.state is not PauseState.OPEN

    @property
    def frozen(self) -> bool:
        """Nothing is computed at all."""
        return self.state is PauseState.PAUSED_ALL

    def enter(self, request: Request, waiting: WaitingQueue, *, front: bool = False) -> None:
        """A request comes: to the queue, or during a pause to those that wait for its end."""
        if self.paused:
            self.parked.append(request)
        elif front:
            waiting.push_front(request)
        else:
            waiting.push(request)

    def close(self, mode: PauseMode, waiting: WaitingQueue) -> None:
        """Pause, or change the way of it. `waiting` loses what is not under way, if that is to
        wait for the end of the pause."""
        self.state = STATE_OF_MODE[mode]
        if not self.frozen:
            fresh = [request for request in waiting if not is_under_way(request)]
            for request in fresh:
                waiting.remove(request)
            self.parked.extendleft(reversed(fresh))  # they came before the pause did

    def open(self, waiting: WaitingQueue) -> None:
        """End the pause: what was parked joins the queue."""
        self.state = PauseState.OPEN
        while self.parked:
            waiting.push(self.parked.popleft())


def is_under_way(request: Request) -> bool:
    """It has told its client something already, or holds KV."""
    return request.status is RequestStatus.PREEMPTED or bool(request.block_ids)
