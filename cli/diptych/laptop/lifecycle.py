"""The life of one local pod: a state machine without processes, sockets or a clock.

PENDING --started--> STARTING --probe ok--> READY <--probe ok / failures--> NOT_READY
   ^                    | exit                | exit                           | exit
   +----- restart ---- BACKING_OFF <----------+--------------------------------+
                        or CRASHED, after three starts of which none ever became ready
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
STABLE_S = 30.0
"""A pod that was ready for this long restarts with the shortest delay."""
MAX_FAILED_STARTS = 3


class Phase(enum.Enum):
    PENDING = "pending"
    STARTING = "starting"
    READY = "ready"
    NOT_READY = "not ready"
    BACKING_OFF = "restarting"
    CRASHED = "crashed"


@dataclass(slots=True)
class PodLife:
    """The state of one pod, kept by its supervisor. Times are seconds of one monotonic clock."""

    failure_threshold: int = 3
    """A ready pod becomes not ready after this many failed readiness probes in a row."""
    phase: Phase = Phase.PENDING
    restarts: int = 0
    changed_at: float = 0.0
    ever_ready: bool = False
    _failed_starts: int = 0
    _failed_probes: int = 0
    _delay_s: float = FIRST_DELAY_S
    _ready_since: float | None = None

    def started(self, now: float) -> None:
        """Note that a process of the pod was started."""
        if self.phase is Phase.BACKING_OFF:
            self.restarts += 1
        self._enter(Phase.STARTING, now)

    def probed(self, ok: bool, now: float) -> None:
        """Note whether a readiness probe was answered."""
        if ok:
            self._failed_probes = 0
            if self.phase is not Phase.READY:
                self._ready_since = now
                self.ever_ready = True
                self._enter(Phase.READY, now)
            return
        self._failed_probes += 1
        if self.phase is Phase.READY and self._failed_probes >= self.failure_threshold:
            self._ready_since = None
            self._enter(Phase.NOT_READY, now)

    def exited(self, now: float) -> float | None:
        """Note that the process ended. Returns the seconds until the next start, or None if it
        should not start again."""
        if self._ready_since is not None and now - self._ready_since >= STABLE_S:
            self._delay_s = FIRST_DELAY_S
        self._ready_since = None
        self._failed_probes = 0
        if not self.ever_ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                self._enter(Phase.CRASHED, now)
                return None
        delay = self._delay_s
        self._delay_s = min(LONGEST_DELAY_S, 2 * delay)
        self._enter(Phase.BACKING_OFF, now)
        return delay

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase = phase
        self.changed_at = now
