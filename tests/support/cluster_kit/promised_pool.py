"""A prefill pool in virtual time, whose size the autoscaler decides: how often is its promise kept?

All pods share one queue. A prompt takes `WORK_S` on average, and is promised within `PROMISED_S`;
routers refuse what would be late, or let it wait. New pods take `START_S` to be ready.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from diptych_operator.api.pools import Counts, DecodePool, PrefillAutoscaling, PrefillPool
from diptych_operator.autoscale import Memory, autoscale
from diptych_operator.reconcile import AUTOSCALE_INTERVAL_S
from diptych_protocol.admin import EngineReport, PromiseCount, RouterReport
from diptych_router.requests.promises import RecentCounts

WORK_S: Final = 0.25
PROMISED_S: Final = 1.0
PROMPT_TOKENS: Final = 1000
START_S: Final = 90.0


def engine_report(role: str, number: int, **facts: Any) -> EngineReport:
    """An engine that does nothing, but for these facts."""
    nothing: dict[str, Any] = {
        "open_tokens": 0, "num_running": 0, "num_waiting": 0, "queued_prompt_tokens": 0,
        "kv_usage": 0.0, "leases_held": 0, "blocks_held": 0, "loads_failed": 0,
        "leases_expired": 0, "stale_reads_refused": 0, "usable": True, "listed": True,
        "draining": False, "verified": True,
    }  # fmt: skip
    return EngineReport(engine_id=f"{role}-{number}", role=role, revision="r", **(nothing | facts))


def router_report(
    engines: Sequence[EngineReport], recent: Sequence[PromiseCount] = (), **facts: Any
) -> RouterReport:
    nothing = {"open_requests": 0, "held_requests": 0}
    return RouterReport(
        ready=True, reason="", serving_revisions=[], engines=list(engines), canaries=[],
        recent_promises=list(recent), **(nothing | facts),
    )  # fmt: skip


class End(NamedTuple):
    at: float
    outcome: str


class PromisedPool:
    """The pool, its queue and its autoscaler."""

    def __init__(self, scaling: PrefillAutoscaling, pods: int, seed: int, *, refuses: bool) -> None:
        self._pool = PrefillPool(autoscaling=scaling)
        self._refuses = refuses
        self._random = random.Random(seed)
        self._memory = Memory()
        self._free_at = [0.0] * pods
        """When each ready pod has done what is queued; a heap."""
        self._starting: list[float] = []
        """When each further pod will be ready; the first first."""
        self._recent = RecentCounts[str]()
        self._to_come: list[End] = []
        """The outcomes of requests that have not ended; a heap."""
        self._begin: list[float] = []
        """When each of them begins to be computed; a heap."""
        self.sizes = [(0.0, pods)]
        """Time, and how many pods the autoscaler wanted from then on."""
        self.outcomes: list[End] = []
        """What became of each request, with the time of its arrival."""

    def run(self, rate: Callable[[float], float], seconds: float) -> None:
        """rate: requests/s at a time."""
        now, next_pass = 0.0, 0.0
        while now < seconds:
            now += self._random.expovariate(rate(now))
            while next_pass <= now:
                self._look(next_pass)
                next_pass += AUTOSCALE_INTERVAL_S
            if self._free_at:
                self.outcomes.append(End(now, self._arrive(now)))

    def share_kept(self, since: float = 0.0) -> float:
        outcomes = [end.outcome for end in self.outcomes if end.at >= since]
        return outcomes.count("kept") / len(outcomes)

    def turns(self, since: float = 0.0) -> int:
        """How often the pool grew after it had shrunk, or shrank after it had grown."""
        sizes = [pods for at, pods in self.sizes if at >= since]
        grew = [b > a for a, b in itertools.pairwise(sizes)]
        return sum(a != b for a, b in itertools.pairwise(grew))

    def _arrive(self, now: float) -> str:
        begin = max(now, self._free_at[0])
        if self._refuses and begin + WORK_S - now > PROMISED_S:
            self._recent.add("refused", now)
            return "refused"
        end = begin + WORK_S * self._random.uniform(0.5, 1.5)
        heapq.heapreplace(self._free_at, end)
        outcome = "kept" if end - now <= PROMISED_S else "missed"
        heapq.heappush(self._to_come, End(end, outcome))
        heapq.heappush(self._begin, begin)
        return outcome

    def _look(self, now: float) -> None:
        """One pass of the operator."""
        while self._starting and self._starting[0] <= now:
            heapq.heappush(self._free_at, self._starting.pop(0))
        while self._to_come and self._to_come[0].at <= now:
            end = heapq.heappop(self._to_come)
            self._recent.add(end.outcome, end.at)
        while self._begin and self._begin[0] <= now:
            heapq.heappop(self._begin)
        ready, wanted = len(self._free_at), self.sizes[-1][1]
        scaling = autoscale(
            self._pool, DecodePool(), Counts(wanted, 1), Counts(ready, 1), [self._report(now)],
            self._memory, now, block_size=16,
        )  # fmt: skip
        self._memory = scaling.memory
        if scaling.desired.prefill != wanted:
            self.sizes.append((now, scaling.desired.prefill))
        self._resize(scaling.desired.prefill, now)

    def _report(self, now: float) -> RouterReport:
        waiting = len(self._begin)
        engines = [engine_report("prefill", number) for number in range(len(self._free_at))]
        queue = {
            "num_running": len(self._to_come) - waiting,
            "num_waiting": waiting,
            "queued_prompt_tokens": PROMPT_TOKENS * waiting,
        }
        engines[:1] = [engine_report("prefill", 0, **queue)] if engines else []
        counts = [
            PromiseCount(pool="prefill", promise="first_token", outcome=outcome, requests=number)
            for outcome, number in self._recent.total(now).items()
        ]
        return router_report([*engines, engine_report("decode", 0)], counts, open_requests=1)

    def _resize(self, wanted: int, now: float) -> None:
        while len(self._free_at) + len(self._starting) < wanted:
            self._starting.append(now + START_S)
        while len(self._free_at) + len(self._starting) > wanted:
            if self._starting:
                self._starting.pop()
            else:
                heapq.heappop(self._free_at)  # a pod that goes ends its work first
