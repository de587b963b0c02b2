"""Sends a core's heartbeats, as `HeartbeatTimer` says when."""

from __future__ import annotations

import time
from collections.abc import Callable

from diptych_engine.control.core import EngineCore
from diptych_engine.scheduling.request import StepPlan
from diptych_frontend.core_client.heartbeat_timer import (
    CALL_S,
    LONGEST_STEP_S,
    QUICK_CALLS,
    HeartbeatTimer,
)
from diptych_protocol import SchedulerStats
from diptych_protocol.wire import Heartbeat


class HeartbeatSender:
    """The loop of a core calls it in each turn, and before whatever may take long."""

    def __init__(
        self,
        core: EngineCore,
        timer: HeartbeatTimer,
        tell: Callable[[Heartbeat, SchedulerStats | None], None],
    ) -> None:
        """`tell`: sends a heartbeat to the followers, with statistics if there are any."""
        self._core, self._timer, self._tell = core, timer, tell
        core.before_step = self._before_step

    def wait_s(self, now: float) -> float | None:
        """How long the loop may wait for messages; None: as long as it wants."""
        return self._timer.wait_s(now) if self._timer.followers else None

    def turned(self) -> None:
        """The loop has done what there was to do."""
        if self._timer.followers:
            heartbeat = self._timer.beat(time.monotonic())
            if heartbeat is not None:
                heartbeat.adapters = list(self._core.adapters.digests())
                self._tell(heartbeat, self._core.stats())

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        self._timer.steps.took(plan.num_tokens, seconds)

    def before_call(self, method: str) -> None:
        """A call is about to be carried out, in the loop."""
        if method not in QUICK_CALLS:
            self._before_silence(CALL_S, in_call=True)

    def _before_step(self, plan: StepPlan) -> None:
        adapters = self._core.adapters
        unusual = plan.images is not None or (adapters.in_use and adapters.lacks(plan.scheduled))
        bound_s = self._timer.steps.bound_s(plan.num_tokens)
        self._before_silence(LONGEST_STEP_S if unusual else bound_s)

    def _before_silence(self, seconds: float, *, in_call: bool = False) -> None:
        if self._timer.followers:
            heartbeat = self._timer.before_silence(time.monotonic(), seconds, in_call=in_call)
            if heartbeat is not None:
                self._tell(heartbeat, None)
