"""The states of several processes as that of one router. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from diptych_protocol.admin import (
    CanaryReport,
    EngineReport,
    Explanation,
    PromiseCount,
    RequestList,
    RouterReport,
)

BREAKER_STATES = ("closed", "half-open", "open")
"""The worst last."""
NOBODY = "no process of the router serves yet"


def state_of_all(states: Sequence[RouterReport]) -> RouterReport:
    """What the operator is told of a router whose processes are in these states.

    An engine is usable or verified if every process says so. Work that processes have open adds
    up; what engines tell of themselves is the same everywhere, and the larger number is the newer
    one or the more careful one.
    """
    ready = any(state.ready for state in states)
    reasons = [state.reason for state in states if state.reason] or [NOBODY]
    return RouterReport(
        ready=ready,
        reason="" if ready else reasons[0],
        open_requests=sum(state.open_requests for state in states),
        held_requests=sum(state.held_requests for state in states),
        serving_revisions=_revisions(states),
        engines=_engines(states),
        canaries=_newest(canary for state in states for canary in state.canaries),
        promises=_added_up(count for state in states for count in state.promises),
        recent_promises=_added_up(count for state in states for count in state.recent_promises),
    )


def _revisions(states: Sequence[RouterReport]) -> list[str]:
    """All that any process may still send requests to."""
    if not all(state.serving_revisions for state in states):
        return []  # one of them may send to all
    return list(dict.fromkeys(name for state in states for name in state.serving_revisions))


def _engines(states: Sequence[RouterReport]) -> list[EngineReport]:
    views: dict[str, list[EngineReport]] = {}
    for engine in (engine for state in states for engine in state.engines):
        views.setdefault(engine.engine_id, []).append(engine)
    return [_engine(of_one, seen_by_all=len(of_one) == len(states)) for of_one in views.values()]


def _engine(views: Sequence[EngineReport], *, seen_by_all: bool) -> EngineReport:
    largest = {
        name: max(getattr(view, name) for view in views)
        for name in (
            "num_running", "num_waiting", "queued_prompt_tokens", "kv_usage", "leases_held",
            "blocks_held", "loads_failed", "leases_expired", "stale_reads_refused",
            "prefix_fetches", "prefix_fetches_failed", "prefix_tokens_fetched",
        )
    }  # fmt: skip
    return msgspec.structs.replace(
        views[0],
        usable=seen_by_all and all(view.usable for view in views),
        verified=seen_by_all and all(view.verified for view in views),
        listed=any(view.listed for view in views),
        draining=any(view.draining for view in views),
        paused=any(view.paused for view in views),
        silent=any(view.silent for view in views),
        breaker=max((view.breaker for view in views), key=BREAKER_STATES.index),
        kept_out=any(view.kept_out for view in views),
        failures=dict(sum((Counter(view.failures) for view in views), Counter())),
        open_tokens=sum(view.open_tokens for view in views),
        **largest,
    )


def _added_up(counts: Iterable[PromiseCount]) -> list[PromiseCount]:
    total = Counter[tuple[str, str, str]]()
    for count in counts:
        total[count.pool, count.promise, count.outcome] += count.requests
    return [
        PromiseCount(pool=pool, promise=promise, outcome=outcome, requests=requests)
        for (pool, promise, outcome), requests in total.items()
    ]


def _newest(canaries: Iterable[CanaryReport]) -> list[CanaryReport]:
    """The newest canary of each pair, newest last."""
    by_pair: dict[tuple[str, str], CanaryReport] = {}
    for canary in sorted(canaries, key=lambda canary: canary.unix_time):
        pair = canary.prefill, canary.decode
        by_pair.pop(pair, None)
        by_pair[pair] = canary
    return list(by_pair.values())


def explanation_of_all(parts: Sequence[Explanation], policy: str, disaggregate: str) -> Explanation:
    """What processes remember under an id. A request was at one of them only."""
    requests = [request for part in parts for request in part.requests]
    requests.sort(key=lambda request: -request.unix_time)
    return Explanation(policy=policy, disaggregate=disaggregate, requests=requests)


def newest_of_all(parts: Sequence[RequestList], limit: int) -> RequestList:
    """The newest requests of all processes."""
    requests = [request for part in parts for request in part.requests]
    requests.sort(key=lambda request: -request.unix_time)
    return RequestList(
        requests=requests[:limit],
        num_remembered=sum(part.num_remembered for part in parts),
        most_remembered=sum(part.most_remembered for part in parts),
    )
