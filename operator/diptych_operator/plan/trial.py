"""How a canary gets its share of the requests: step by step, or none any more.

    step 0 ─▶ step 1 ─▶ ... ─▶ passed: routers switch
       └─────────┴─▶ failed: its share is 0, until the spec changes

A step begins when all routers give the canary its weight. It ends once it has lasted long enough
and enough requests went well; it fails as soon as too many did not. The status keeps where a trial
stands, so another operator goes on from there. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Self

import msgspec
from msgspec import Meta

from diptych_operator.api.service import Analysis, Canary
from diptych_protocol import UNREADABLE
from diptych_protocol.admin import TrialReport

FEWEST_BAD: Final = 3
"""With fewer bad requests than this, chance may be the cause."""
ALL_REQUESTS: Final = 100
ROUNDING: Final = 1e-6


class Trial(msgspec.Struct, frozen=True):
    """Where the trial of a revision stands: `status.rollout.canary`."""

    revision: str
    step: Annotated[int, Meta(ge=0)] = 0
    """How many steps it has passed."""
    weight: Annotated[int, Meta(ge=0, le=ALL_REQUESTS)] = 0
    """Percent of new requests that it gets."""
    since: str = ""
    """When all routers had that weight, as an RFC 3339 time; empty until they have it."""
    failed: str = ""
    """Why it failed; empty if it has not."""

    @classmethod
    def read(cls, status: dict[str, str]) -> Self | None:
        """None for what `text` did not write."""
        try:
            return msgspec.convert(status, cls, strict=False)
        except UNREADABLE:
            return None

    def text(self) -> dict[str, str]:
        return {name: str(value) for name, value in msgspec.structs.asdict(self).items() if value}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of the trial now."""

    stable: str = ""
    """The revision that last served alone."""
    before: Trial | None = None
    now: str = ""
    """An RFC 3339 time."""
    held_s: float = 0.0
    """Seconds since `before.since`."""
    reports: Sequence[TrialReport | None] = field(default=())
    """One of each router; None of one that tries nothing or does not answer."""
    earlier: Sequence[TrialReport] = ()
    """What routers saw before they ended, began anew or fell silent: see `TrialMemory`."""
    untrusted: Collection[str] = ()
    """Why engines of the target do not receive KV, in words."""
    again: bool = False
    """The spec has changed: what failed is tried again."""

    def of(self, revision: str) -> Trial | None:
        """The trial of a revision that has begun, and is not to begin again."""
        trial = self.before
        if trial in (None, Trial(revision)) or trial.revision != revision:
            return None
        if trial.failed and self.again:
            return None
        return trial


def advance(canary: Canary, trial: Trial, evidence: Evidence, problem: str) -> Trial:
    """Return where the trial stands now. problem: why it fails, whatever the requests say."""
    if trial.failed or has_passed(canary, trial):
        return trial
    seen = _total(trial, evidence)
    why = problem or next(iter(evidence.untrusted), "") or _failure(canary.analysis, seen)
    if why:
        return Trial(trial.revision, trial.step, failed=why)
    now = place(canary, trial)
    step = canary.steps[now]
    if trial.weight != step.weight:
        return Trial(trial.revision, now, step.weight)  # it begins, or the spec has changed
    if not all_follow(trial, evidence):  # also later: what one does not tell may be the worst
        return trial
    if not trial.since:
        return msgspec.structs.replace(trial, since=evidence.now)
    if evidence.held_s < step.pause_seconds or lacks_requests(canary, trial, evidence):
        return trial
    passed = now + 1
    more = canary.steps[passed].weight if passed < len(canary.steps) else ALL_REQUESTS
    return Trial(trial.revision, passed, more)


def all_follow(trial: Trial, evidence: Evidence) -> bool:
    """Whether every router tells that it gives the canary its present weight."""
    return bool(evidence.reports) and all(_is_of(trial, each) for each in evidence.reports)


def place(canary: Canary, trial: Trial) -> int:
    """The index of its step: the last one, if the spec has fewer than it had."""
    return min(trial.step, len(canary.steps) - 1)


def has_passed(canary: Canary, trial: Trial) -> bool:
    """Whether it went through the last step: fewer steps than it has passed prove nothing."""
    over = trial.step >= len(canary.steps) and trial.weight == ALL_REQUESTS
    return over and not trial.failed


def lacks_requests(canary: Canary, trial: Trial, evidence: Evidence) -> int:
    """How many requests have to end before the step can be judged; with weight 0, none. An answer
    that goes on may yet fail, or turn out slow."""
    wanted = canary.analysis.min_requests if trial.weight else 0
    seen = _total(trial, evidence)
    return max(0, wanted - seen.requests + seen.open)


def is_unjudged(canary: Canary, trial: Trial, evidence: Evidence) -> bool:
    """Whether its step only waits for requests, which may never come."""
    if trial.failed or has_passed(canary, trial) or not trial.since:
        return False
    over = evidence.held_s >= canary.steps[place(canary, trial)].pause_seconds
    return over and lacks_requests(canary, trial, evidence) > 0


def _is_of(trial: Trial, report: TrialReport | None) -> bool:
    """Whether a router gives the canary its present weight."""
    return report is not None and (report.revision, report.weight) == (trial.revision, trial.weight)


def _total(trial: Trial, evidence: Evidence) -> TrialReport:
    """What all routers together saw in this step."""
    told = (*evidence.reports, *evidence.earlier)
    those = [report for report in told if report is not None and _is_of(trial, report)]
    names = ("requests", "failed", "late", "ended", "slow", "handed_over", "open")
    sums = {name: sum(max(0, getattr(report, name)) for report in those) for name in names}
    return TrialReport(revision=trial.revision, weight=trial.weight, **sums)


class TrialMemory:
    """Keeps what routers saw of a step: one that ends or restarts would take it along, and what is
    left could show the canary as better, or worse, than it is."""

    def __init__(self) -> None:
        self._step: Trial | None = None
        self._newest: dict[str, TrialReport] = {}
        """By the routers' addresses."""
        self._over: list[TrialReport] = []
        """The last words of routers that have begun to count anew."""

    def earlier(self, trial: Trial, told: Mapping[str, TrialReport | None]) -> list[TrialReport]:
        """Take what routers say now, by their addresses, and return what they do not say any more.
        Answers that went on then do not count: how they ended nobody tells."""
        step = Trial(trial.revision, trial.step, trial.weight)
        if step != self._step:
            self._step, self._newest, self._over = step, {}, []
        now = {at: report for at, report in told.items() if report and _is_of(step, report)}
        for at, report in now.items():
            if at in self._newest and report.requests < self._newest[at].requests:
                self._over.append(self._newest[at])
        self._newest |= now
        silent = (report for at, report in self._newest.items() if at not in now)
        return [
            msgspec.structs.replace(each, requests=each.requests - each.open, open=0)
            for each in (*self._over, *silent)
        ]


def _failure(analysis: Analysis, seen: TrialReport) -> str:
    """What the requests have against the canary; empty if nothing."""
    kept = 0.0 if analysis.attainment is None else analysis.attainment
    moved = 0.0 if analysis.handed_over is None else analysis.handed_over
    alone = max(0, seen.ended - seen.handed_over)
    for bad, of, most, what in (
        (seen.failed, seen.requests, analysis.errors, "requests failed (analysis.errors)"),
        (seen.late, seen.requests, 1 - kept, "first tokens missed slo.ttftMs"),
        (seen.slow, seen.ended, 1 - kept, "answers missed slo.interTokenMs"),
        (alone, seen.ended, 1 - moved, "prompts were not handed over (analysis.handedOver)"),
    ):
        if bad >= FEWEST_BAD and bad > most * of + ROUNDING:
            return f"{bad} of {of} {what}"
    return ""
