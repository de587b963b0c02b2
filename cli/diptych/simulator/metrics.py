"""What users saw, and how many of them got what was promised."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diptych.simulator.plan import Job
from diptych_router.engines.engine_table import Role

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Objectives:
    """What every request is to get."""

    ttft_s: float
    tpot_s: float
    """Seconds a token after the first one, on average over the request."""


@dataclass(slots=True)
class Log:
    """Every request and every gap between tokens, in the order of their ends."""

    jobs: list[Job] = field(default_factory=list)
    gap_ends: list[float] = field(default_factory=list)
    gap_seconds: list[float] = field(default_factory=list)
    gap_counts: list[int] = field(default_factory=list)
    """How many streams had this gap at this moment."""
    unanswered: list[float] = field(default_factory=list)
    """Arrivals of requests that were too long for an engine, or for which none was left."""
    refused: list[float] = field(default_factory=list)
    """Arrivals of requests that routers refused, because their first token would be late."""
    turns: list[tuple[float, str, Role]] = field(default_factory=list)
    """When which pod got which role."""
    preemptions: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens that engines found in their prefix caches."""
    busy_s: dict[str, float] = field(default_factory=dict)

    def saw_gaps(self, now: float, seconds: float, streams: int) -> None:
        if streams:
            self.gap_ends.append(now)
            self.gap_seconds.append(seconds)
            self.gap_counts.append(streams)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Milliseconds and rates of the requests that arrived within a window."""

    requests: int
    """Those that were answered."""
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    tpot_ms: dict[str, float]
    output_tokens_per_s: float
    """Over all of the run: from the first arrival to the last end."""
    attained: float
    """Part of all requests, also of those that failed or were refused, that got what was
    promised."""
    goodput_per_s: float
    """Number of those requests per second of the window."""
    preemptions: int
    hit_rate: float
    """Part of all prompt tokens that engines found in their prefix caches, over all of the run."""
    failed: int
    """Requests that were not answered."""
    refused: int
    """Requests that routers refused at once."""


def summarise(
    log: Log, objectives: Objectives, begin: float = 0.0, end: float = float("inf")
) -> RunSummary:
    """Over requests that arrived from `begin` to `end` (seconds of the run)."""
    jobs = [job for job in log.jobs if begin <= job.arrival < end]
    if not jobs:
        raise ValueError("no request arrived in the window and ended")
    arrival = np.array([job.arrival for job in jobs])
    ttft = np.array([job.first_at for job in jobs]) - arrival
    ends = np.array([job.ended_at for job in jobs])
    outputs = np.array([job.request.output for job in jobs])
    tpot = (ends - arrival - ttft) / np.maximum(outputs - 1, 1)
    failed = sum(begin <= arrived < end for arrived in log.unanswered)
    refused = sum(begin <= arrived < end for arrived in log.refused)
    good = int(((ttft <= objectives.ttft_s) & (tpot <= objectives.tpot_s)).sum())
    span = (min(end, float(arrival.max())) - max(begin, float(arrival.min()))) or 1.0
    first, last = min(job.arrival for job in log.jobs), max(job.ended_at for job in log.jobs)
    return RunSummary(
        requests=len(jobs),
        ttft_ms=_percentiles(ttft, np.ones(len(jobs))),
        itl_ms=_gaps(log, begin, end),
        tpot_ms=_percentiles(tpot[outputs > 1], np.ones(int((outputs > 1).sum()))),
        output_tokens_per_s=sum(job.request.output for job in log.jobs) / (last - first),
        attained=good / (len(jobs) + failed + refused),
        goodput_per_s=good / span,
        preemptions=log.preemptions,
        hit_rate=log.cached_tokens / sum(job.request.prompt for job in log.jobs),
        failed=failed,
        refused=refused,
    )


def _gaps(log: Log, begin: float, end: float) -> dict[str, float]:
    moments = np.array(log.gap_ends)
    chosen = (begin <= moments) & (moments < end)
    if not chosen.any():
        chosen = np.ones(len(moments), dtype=bool)
    return _percentiles(np.array(log.gap_seconds)[chosen], np.array(log.gap_counts)[chosen])


def _percentiles(seconds: NDArray[np.float64], counts: NDArray[np.float64]) -> dict[str, float]:
    """In milliseconds, by name; each value counts `counts` times."""
    if not len(seconds):
        return {f"p{percent}": 0.0 for percent in PERCENTILES}
    order = np.argsort(seconds, kind="stable")
    total = np.cumsum(counts[order])
    places = np.searchsorted(total, [total[-1] * percent / 100 for percent in PERCENTILES])
    values = seconds[order][np.minimum(places, len(seconds) - 1)] * 1e3
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, values, strict=True)}
