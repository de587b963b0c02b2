"""Decides what each step computes. Pure: values in, values out; no clock, torch or sockets.

There are no prefill and decode phases: a request that has tokens without KV gets a share of the
step's token budget, be it a chunk of its prompt or the one token it sampled last. Running requests
come first, in their order; when blocks run out the last of them loses its blocks and is computed
again later (preemption by recompute). Waiting requests follow. Under the policy `fcfs` the order is
that of arrival, and waiting requests whose KV came through the hinge go ahead of the others,
because they hold blocks already; under `priority` it is (priority, arrival, id) everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diptych_engine.scheduling.fair_rows import who_gives_way
from diptych_engine.scheduling.request import (
    Request,
    RequestStatus,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenOutput,
)
from diptych_engine.scheduling.scheduler_state import SchedulerState
from diptych_engine.scheduling.scheduler_stats import snapshot
from diptych_engine.scheduling.step_entry import share_out
from diptych_engine.scheduling.step_results import apply_results
from diptych_engine.scheduling.waiting_queue import service, turn_in_class
from diptych_protocol import SchedulerStats

SHARED_STEPS = 1000
"""How many further steps stay short after there were several tenants; these take some minutes."""


@dataclass(slots=True)
class Scheduler(SchedulerState):
    """Chooses what each step computes, and applies what came of it."""

    _order: Callable[[Request], Any] = field(init=False)
    """Sort key of running requests while there are several tenants."""

    def __post_init__(self) -> None:
        SchedulerState.__post_init__(self)
        self._order = turn_in_class if self.policy == "priority" else service

    def schedule(self) -> StepPlan:
        """Choose the next step's work and allocate its blocks."""
        budget = allowed = 0 if self.gate.frozen else self.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        chunks: list[tuple[Request, int]] = []
        preempted = False
        if allowed and self.tenants.several:
            self._be_fair()
        block_size = self.block_size
        index = 0
        for request in self.running:  # the loop may remove requests, but only from the end
            if budget == 0:
                break
            index += 1
            start = request.num_computed_tokens
            known = end = len(request.token_ids)
            if end > start + 1:
                # Each request after it still gets at least one token of the step.
                end = min(end, start + max(1, budget - (len(self.running) - index)))
                if chunks and not self.reserve(request, end):
                    continue
            if end > len(request.block_ids) * block_size:
                preempted |= self._make_room(request, end)
                if request.status is not RequestStatus.RUNNING:
                    break
            if known > start + 1:
                chunks.append((request, end))
                continue
            scheduled.append(ScheduledRequest(request, start, 1, request.pooling is None))
            budget -= 1
        if chunks or self.waiting:
            budget = share_out(self, scheduled, budget, chunks, admitting=not preempted)
        removed, self._removed = self._removed, []
        return StepPlan(scheduled, allowed - budget, removed)

    def _be_fair(self) -> None:
        """Serve those first who were served least, and take from those who were served most."""
        self.shared_until = self.stats.steps + SHARED_STEPS
        self.running.sort(key=self._order)
        while (victim := who_gives_way(self)) is not None:
            if not (self.has_free_row() and self.reclaim_unused()):
                self._preempt(victim)

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenOutput]:
        """Apply a step's results. Requests that ended meanwhile get nothing more."""
        outputs = apply_results(plan, result, self.prefixes, self.stats)
        if self.journey is not None:
            self.journey.saw_tokens(outputs, self.stats.steps)
        return outputs

    # --- what others ask ----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """A step would compute something (or at least admit a request)."""
        return bool(self.running or self.waiting) and not self.gate.frozen

    @property
    def quiet(self) -> bool:
        """No step will compute anything, and the hinge will bring nothing to compute."""
        return self.gate.frozen or not (self.running or self.waiting or self.loading)

    def snapshot(self) -> SchedulerStats:
        """The running totals with the gauges of this moment."""
        return snapshot(self)
