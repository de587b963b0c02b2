"""Measures a rollout's progress, which the status itself keeps, and whether it stalls."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Self

import msgspec

from diptych_operator.api.service import InferenceService
from diptych_operator.api.status import MAX_MESSAGE, RolloutStatus
from diptych_operator.counts import Counts
from diptych_operator.plan import Phase, Step
from diptych_operator.revision import revision

AT_REST: frozenset[str] = frozenset({"", Phase.Idle, Phase.Suspended})
"""Phases without anything left to do."""

_TEXT = re.compile(
    r"^(?P<revision>\S*) prefill=(?P<prefill>\d{1,6}) decode=(?P<decode>\d{1,6}) "
    r"verified=(?P<verified>[01]) old=(?P<old>\d{1,6}) draining=(?P<draining>\d{1,6})$"
)


@dataclass(frozen=True, slots=True)
class Progress:
    """The counts of a rollout."""

    revision: str
    ready: Counts
    """Ready pods of the revision."""
    verified: bool
    old: int
    """Pods of other revisions, staying or terminating."""
    draining: int
    """Those of them that are terminating."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse `RolloutStatus.progress`; None for a text that `text()` did not write."""
        found = _TEXT.match(text)
        if found is None:
            return None
        ready = Counts(int(found["prefill"]), int(found["decode"]))
        verified, old, draining = (int(found[key]) for key in ("verified", "old", "draining"))
        return cls(found["revision"], ready, bool(verified), old, draining)

    def text(self) -> str:
        return (
            f"{self.revision} prefill={self.ready.prefill} decode={self.ready.decode} "
            f"verified={self.verified:d} old={self.old} draining={self.draining}"
        )

    def closer_than(self, best: Progress) -> bool:
        return (
            self.ready.prefill > best.ready.prefill
            or self.ready.decode > best.ready.decode
            or self.verified > best.verified
            or self.old < best.old
            or self.draining < best.draining
        )

    def best_of(self, best: Progress) -> Progress:
        """Return the best values so far: a pod that dies and starts again counts once."""
        ready = Counts(
            max(self.ready.prefill, best.ready.prefill), max(self.ready.decode, best.ready.decode)
        )
        return replace(
            self,
            ready=ready,
            verified=self.verified or best.verified,
            old=min(self.old, best.old),
        )


def rollout_status(
    step: Step, counted: Progress, previous: RolloutStatus, now: str
) -> RolloutStatus:
    """Return the rollout's status. `last_progress_at` moves when it advances."""
    message = step.message[:MAX_MESSAGE]
    best = Progress.parse(previous.progress)
    if step.phase in AT_REST:
        return msgspec.structs.replace(previous, phase=str(step.phase), message=message)
    if best is None or best.revision != counted.revision or previous.phase in AT_REST:
        return RolloutStatus(str(step.phase), message, now, counted.text())
    at = now if counted.closer_than(best) else previous.last_progress_at
    return RolloutStatus(str(step.phase), message, at, counted.best_of(best).text())


def deadline_missed(
    rollout: RolloutStatus, service: InferenceService, counted: Progress, now: str
) -> bool:
    """Whether the rollout of the service's revision has not advanced within its deadline.

    False for a status of another revision: this one has only just been requested. While old pods
    drain, their time to drain is added. `counted` is the present count: the rollout may have
    advanced while no operator watched. `now` is an RFC 3339 time.
    """
    best = Progress.parse(rollout.progress)
    if rollout.phase in AT_REST or best is None or best.revision != revision(service):
        return False
    if counted.closer_than(best):
        return False
    allowed = service.spec.rollout.progress_deadline_seconds
    if best.draining:
        allowed += service.spec.availability.drain_seconds
    try:
        waited = datetime.fromisoformat(now) - datetime.fromisoformat(rollout.last_progress_at)
    except (ValueError, TypeError):  # somebody else's hand was in the status
        return False
    return waited.total_seconds() > allowed
