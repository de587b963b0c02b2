"""Computes the pods that a pool needs to keep its promise: `autoscaling.attainment`,
docs/autoscaling.md.

A pool that keeps too few promises grows in proportion to the shortfall, waits until all that it
observes is from the new size, and looks again. A pool that keeps its promises may remove a few pods
at a time where the other signals allow it, to find out whether fewer are enough. If they are not,
it remembers how many requests/s per pod were too many, and does not try again while the load would
be nearly as high. So a steady load does not make it oscillate. This module performs no I/O.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from diptych_protocol.admin import RECENT_S, RouterReport

SETTLING_S: Final = 2 * RECENT_S
"""Time after adding pods until most answers that began before no longer count as recent."""
FEWEST_NOT_KEPT: Final = 3
"""With fewer misses than this, chance may be the cause."""
TRIED_PART: Final = 0.2
"""Share of the pods that is removed at a time; at least one pod."""
SAFE_PART: Final = 0.9
"""Fewer pods are tried up to this share of the rate per pod that was too much: rates fluctuate."""


@dataclass(frozen=True, slots=True)
class Attainment:
    """What all routers together recently measured about a pool's promises."""

    share: float
    """The share of requests that kept the promise, 0 to 1. With several promises, the lowest."""
    not_kept: int
    """Requests that did not keep the promise, including those that were refused."""
    refused: int
    requests: int


@dataclass(frozen=True, slots=True)
class Overload:
    """When a pool last missed its promise."""

    pods: int
    per_pod: float
    """Requests/s that each of its pods served."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What was learned about a pool. If it is lost, the pool may try too few pods again."""

    ready: int = 0
    since: float = 0.0
    """When this number of pods was first ready."""
    shrunk: bool = False
    """Whether there were more pods before."""
    overload: Overload | None = None


NEW: Final = Learned()
"""The state of a new pool, about which nothing is known."""


@dataclass(frozen=True, slots=True)
class Need:
    """The pods that a pool needs for its promise, and why."""

    pods: int
    why: str
    learned: Learned


def attainment(reports: Sequence[RouterReport], pool: str) -> Attainment | None:
    """Add up the routers' counts, not their shares. None: no recent request was measured."""
    counts: dict[str, Counter[str]] = {}
    for report in reports:
        for count in report.recent_promises:
            if count.pool == pool:
                of_promise = counts.setdefault(count.promise, Counter())
                of_promise[count.outcome] += max(0, count.requests)
    found = [_attained(outcomes) for outcomes in counts.values() if outcomes.total()]
    return min(found, key=lambda each: each.share, default=None)


def _attained(outcomes: Counter[str]) -> Attainment:
    requests, kept = outcomes.total(), outcomes["kept"]
    return Attainment(kept / requests, requests - kept, outcomes["refused"], requests)


def need(
    target: float,
    seen: Attainment | None,
    learned: Learned,
    now: float,
    *,
    current: int,
    ready: int,
    crowded: bool,
) -> Need:
    """Return the pods needed for the promise; 0 if the pool has no requests.

    target: the share of requests that is to keep it. current: pods that are wanted now. crowded:
    requests share pods. If none do, more pods would not make any request faster.
    """
    if ready != learned.ready:
        learned = replace(learned, ready=ready, since=now, shrunk=ready < learned.ready)
    if seen is None:
        return Need(0, "", learned)
    settled = ready > 0 and now - learned.since >= SETTLING_S
    short = seen.share < target and seen.not_kept >= FEWEST_NOT_KEPT
    crowded = crowded or seen.refused > 0
    # What fewer pods miss now, more did not; but what more pods miss, fewer may have begun.
    telling = settled or (short and learned.shrunk and ready > 0)
    if telling and (seen.share >= target or (short and crowded)):
        learned = replace(learned, overload=_overload(learned, seen, short=short))
    why = f", {seen.share:.1%} of {seen.requests} requests keep the promise"
    if short and not crowded:
        return Need(current, f"{why}, each with a pod of its own", learned)
    if short and telling and ready >= current:
        wanted = math.ceil(current * min(2.0, target / max(seen.share, target / 2)))
        return Need(max(current + 1, wanted), why, learned)
    if short or not settled:
        return Need(current, why, learned)
    return Need(min(current, _enough(learned, seen, current)), why, learned)


def _overload(learned: Learned, seen: Attainment, *, short: bool) -> Overload | None:
    """short: the promise is missed now."""
    if short:
        return Overload(learned.ready, (seen.requests - seen.refused) / RECENT_S / learned.ready)
    known = learned.overload
    if known is None or learned.ready > known.pods:
        return known  # many pods can do more each than few
    disproved = SAFE_PART * _each(seen, learned.ready) > known.per_pod
    return None if disproved else known


def _each(seen: Attainment, pods: int) -> float:
    """Requests/s of a pod."""
    return seen.requests / RECENT_S / pods


def _enough(learned: Learned, seen: Attainment, current: int) -> int:
    """The fewest pods that are worth a try for so many requests."""
    tried = current - max(1, int(TRIED_PART * current))
    if learned.overload is None or learned.overload.per_pod <= 0:
        return tried
    return max(tried, math.ceil(_each(seen, 1) / (SAFE_PART * learned.overload.per_pod)))
