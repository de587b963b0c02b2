"""Measures a rollout's progress, which the status itself keeps, and whether it stalls."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self

import msgspec

from diptych_operator.api.pools import Counts
from diptych_operator.api.service import InferenceService
from diptych_operator.api.status import MAX_MESSAGE, RolloutStatus
from diptych_operator.plan import Phase, Step
from diptych_operator.revision import revision
from diptych_operator.status.observed import seconds_between

AT_REST: frozenset[str] = frozenset({"", Phase.Idle, Phase.Suspended})
"""Phases without anything left to do."""

_TEXT = re.compile(
    r"^(?P<revision>\S*) prefill=(?P<prefill>\d{1,6}) decode=(?P<decode>\d{1,6}) "
    r"verified=(?P<verified>[01]) old=(?P<old>\d{1,6}) draining=(?P<draining>\d{1,6})"
    r"(?: waiting=(?P<waiting>\d{1,6}))?$"
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
    waiting: int = 0
    """Pods of the revision that find no node, while others are there."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse `RolloutStatus.progress`; None for a text that `text()` did not write."""
        found = _TEXT.match(text)
        if found is None:
            return None
        ready = Counts(int(found["prefill"]), int(found["decode"]))
        verified, old, draining, waiting = (
            int(found[key] or 0) for key in ("verified", "old", "draining", "waiting")
        )
        return cls(found["revision"], ready, bool(verified), old, draining, waiting)

    def text(self) -> str:
        waiting = f" waiting={self.waiting}" if self.waiting else ""
        return (
            f"{self.revision} prefill={self.ready.prefill} decode={self.ready.decode} "
            f"verified={self.verified:d} old={self.old} draining={self.draining}{waiting}"
        )

    def closer_than(self, best: Progress, *, failed: bool) -> bool:
        """Whether anything is better than ever. A rollout that `failed` has its waiting pods given
        up, which is nothing better."""
        return (
            (self.waiting < best.waiting and not failed)
            or self.ready.prefill > best.ready.prefill
            or self.ready.decode > best.ready.decode
            or self.verified > best.verified
            or self.old < best.old
            or self.draining < best.draining
        )

    def best_of(self, best: Progress, *, failed: bool) -> Progress:
        """Return the best values so far: a pod that dies and starts again counts once."""
        ready = Counts(
            max(self.ready.prefill, best.ready.prefill), max(self.ready.decode, best.ready.decode)
        )
        return replace(
            self,
            ready=ready,
            verified=self.verified or best.verified,
            old=min(self.old, best.old),
            waiting=max(self.waiting, best.waiting) if failed else self.waiting,
        )


def rollout_status(
    step: Step, counted: Progress, previous: RolloutStatus, now: str
) -> RolloutStatus:
    """Return the rollout's status. `last_progress_at` moves when it advances."""
    message = step.message[:MAX_MESSAGE]
    trial = {} if step.trial is None else step.trial.text()
    best = Progress.parse(previous.progress)
    if step.phase in AT_REST:
        return msgspec.structs.replace(
            previous, phase=str(step.phase), message=message, canary=trial
        )
    if best is None or best.revision != counted.revision or previous.phase in AT_REST:
        return RolloutStatus(str(step.phase), message, now, counted.text(), trial)
    failed = step.phase is Phase.Failed
    closer = counted.closer_than(best, failed=failed) or trial != previous.canary
    if previous.phase == Phase.Failed and not (failed or closer):  # a changed spec tries again
        return RolloutStatus(str(step.phase), message, now, counted.text(), trial)
    at = now if closer else previous.last_progress_at
    counts = counted.best_of(best, failed=failed)
    return RolloutStatus(str(step.phase), message, at, counts.text(), trial)


def lacks_room(rollout: RolloutStatus, counted: Progress) -> bool:
    """Whether pods of the new revision find no node, or found none when it failed."""
    best = Progress.parse(rollout.progress)
    before = best is not None and best.revision == counted.revision and best.waiting > 0
    return counted.waiting > 0 or (before and rollout.phase == Phase.Failed)


def deadline_missed(
    rollout: RolloutStatus, service: InferenceService, counted: Progress, now: str
) -> bool:
    """Whether the rollout of the service's revision has not advanced within its deadline.

    False for a status of another revision: this one has only just been requested. While old pods
    drain, their time to drain is added. Where pods find no node, `whenFull` may say that it has
    failed at once, or never. What has failed is tried again with a changed spec: a podTemplate or
    resources may be what it lacked, and they make no revision. `counted` is the present count: the
    rollout may have advanced while no operator watched. `now` is an RFC 3339 time.
    """
    best = Progress.parse(rollout.progress)
    if rollout.phase in AT_REST or best is None or best.revision != revision(service):
        return False
    failed = rollout.phase == Phase.Failed
    if counted.closer_than(best, failed=failed):
        return False
    if "since" in rollout.canary or "failed" in rollout.canary:
        return False  # a canary lasts as long as its steps, and fails by what requests show
    if failed and service.status.observed_generation != service.metadata.generation:
        return False
    when_full = service.spec.rollout.when_full
    if when_full != "ReplaceInPlace" and lacks_room(rollout, counted):
        return when_full == "Fail"
    allowed = service.spec.rollout.progress_deadline_seconds
    if best.draining:
        allowed += service.spec.availability.drain_seconds
    return seconds_between(rollout.last_progress_at, now) > allowed
