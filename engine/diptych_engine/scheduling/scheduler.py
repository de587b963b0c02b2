"""Decides what each step computes. Pure: values in, values out; no clock, torch or sockets.

The rooms around it read its view and its properties, and change it by its commands; its queues,
its pool and its tables are its own.

There are no prefill and decode phases: a request that has tokens without KV gets a share of the
step's token budget, be it a chunk of its prompt or the one token it sampled last. Running requests
come first, in their order; when blocks run out the last of them loses its blocks and is computed
again later (preemption by recompute). Waiting requests follow. Under the policy `fcfs` the order is
that of arrival, and waiting requests whose KV came through the hinge go ahead of the others,
because they hold blocks already; under `priority` it is (priority, arrival, id) everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych_engine.scheduling.fair_rows import who_gives_way
from diptych_engine.scheduling.request import (
    LoadOrder,
    Request,
    RequestStatus,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenOutput,
)
from diptych_engine.scheduling.scheduler_state import SchedulerState
from diptych_engine.scheduling.scheduler_view import SchedulerView, snapshot
from diptych_engine.scheduling.step_entry import share_out
from diptych_engine.scheduling.step_results import apply_results
from diptych_engine.scheduling.waiting_queue import service, turn_in_class
from diptych_protocol import (
    KVTransferStats,
    PauseMode,
    RequestJourneyEvent,
    SchedulerStats,
)

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
        encoder = self.encoder
        if encoder.passed:
            encoder.let_go()
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
        images = None if encoder.work is None else encoder.take_work()
        return StepPlan(scheduled, allowed - budget, removed, images=images)

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
            self.journey.saw_step(plan, outputs, self.stats.steps)
        return outputs

    # --- what others read ---------------------------------------------------------------------

    def view(self) -> SchedulerView:
        """What there is at this moment."""
        return SchedulerView.of(self)

    @property
    def has_work(self) -> bool:
        """A step would compute something (or at least admit a request)."""
        return bool(self.running or self.waiting) and not self.gate.frozen

    @property
    def quiet(self) -> bool:
        """No step will compute anything, and the hinge will bring nothing to compute."""
        return self.gate.frozen or not (self.running or self.waiting or self.loading)

    @property
    def paused(self) -> bool:
        """New requests wait for the end of a pause."""
        return self.gate.paused

    @property
    def can_finish_more(self) -> bool:
        """Some request is not parked, and steps are computed."""
        return len(self.requests) > len(self.gate.parked) and not self.gate.frozen

    @property
    def has_waiting(self) -> bool:
        """Some request waits in the queue."""
        return bool(self.waiting)

    @property
    def has_leases(self) -> bool:
        """Some lease holds blocks."""
        return len(self.leased) > 0

    @property
    def hinge_at_rest(self) -> bool:
        """Nothing is lent, and nothing is fetched."""
        return not (self.loading or self.early.loads or self.has_leases)

    @property
    def now_running(self) -> Sequence[Request]:
        """The running requests; whoever wants them after this step makes a copy."""
        return self.running

    @property
    def unfinished(self) -> Collection[Request]:
        """Every request that has not ended, in the order in which they came."""
        return self.requests.values()

    def find(self, request_id: str) -> Request | None:
        """The unfinished request of this id."""
        return self.requests.get(request_id)

    def is_loading(self, request_id: str) -> bool:
        """The hinge writes to the blocks of a request of this id, which may have ended."""
        return request_id in self.loading

    def snapshot(self) -> SchedulerStats:
        """The running totals with the gauges of this moment."""
        return snapshot(self)

    # --- commands: pauses and caches ----------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Pause, or change the way of the pause that there is."""
        self.gate.close(mode, self.waiting)

    def end_pause(self) -> None:
        """Go on; what came meanwhile joins the queue. Harmless without a pause."""
        self.gate.open(self.waiting)

    def forget_cache(self, *, even_held: bool = False) -> bool:
        """Forget every cached prefix. False, and nothing is done, if a block is in use, unless
        `even_held`: then no request finds what blocks in use hold now."""
        return self.pool.forget_all(even_held=even_held)

    def forget_images(self) -> int:
        """The features of images are gone. Returns how many images had some."""
        return self.encoder.forget_all()

    def discard_loads(self) -> list[str]:
        """Use nothing of what the hinge brings from now on: its requests compute their prompts
        here. Returns the ids of the loads to cancel."""
        for request in self.loading.values():
            request.forgo_remote()
        return [*self.loading, *self.early.drop_all()]

    def take_stations(self) -> dict[bytes, list[RequestJourneyEvent]]:
        """What happened to requests since the last call, by client, if anybody wants to know."""
        return {} if self.journey is None else self.journey.take()

    def take_load_orders(self) -> list[LoadOrder]:
        """The loads to start now, once."""
        orders, self.load_orders = self.load_orders, []
        return orders

    # --- commands: leases ---------------------------------------------------------------------

    def begin_lease(self, lease_id: str) -> None:
        """There is a new lease, without blocks yet."""
        self.leased.begin(lease_id)

    def has_lease(self, lease_id: str) -> bool:
        """A lease of this id has not ended."""
        return lease_id in self.leased

    def num_lent(self, lease_id: str) -> int:
        """How many blocks a lease has; 0 if it has ended."""
        return self.leased.count(lease_id)

    def lend(self, lease_id: str, block_ids: list[int]) -> list[int]:
        """Pin blocks that somebody holds, after those that the lease has. Returns all of them."""
        return self.leased.lend(lease_id, block_ids)

    def lend_prefix(self, lease_id: str, names: list[bytes], num_known: int) -> list[int]:
        """Pin what is remembered of a prefix; nothing during a pause, when memory may go."""
        return [] if self.gate.paused else self.leased.lend_prefix(lease_id, names, num_known)

    def end_lease(self, lease_id: str) -> None:
        """Nobody reads the blocks of a lease any more; one that has ended is ignored."""
        self.leased.end(lease_id)

    # --- who follows what is remembered -------------------------------------------------------

    def record_prefixes(self, wanted: bool) -> None:
        """Note what `take_prefix_changes` returns, or cease to."""
        self.pool.record_changes(wanted)

    def remembered_prefixes(self) -> list[bytes]:
        """The hashes of all blocks that later prompts may share."""
        return self.pool.remembered_hashes()

    def take_prefix_changes(self) -> dict[bytes, bool]:
        """Hash -> whether it is remembered now, for all blocks that changed since the last call."""
        return self.pool.take_changes()

    # --- commands: early loads ----------------------------------------------------------------

    def reserve_early(self, announced: Request) -> LoadOrder | None:
        """Take blocks for a request to come. None: there is not room enough, or requests that are
        here wait for it."""
        return None if self.waiting or self.gate.paused else self.early.reserve(announced)

    def claim_early(self, request: Request) -> bool:
        """An announced request has come; False: nothing was fetched for it, or something else."""
        return self.early.claim(request)

    def has_early(self, request_id: str) -> bool:
        """Something is fetched, or was, for a request of this id to come."""
        return request_id in self.early.loads

    def drop_early(self, request_id: str) -> None:
        """An announced request will not come, or is to compute its prompt here. Its load, if under
        way, must be cancelled."""
        self.early.drop(request_id)

    def drop_all_early(self) -> list[str]:
        """The same for all; returns the ids of the loads to cancel."""
        return self.early.drop_all()

    def count_early(self, stats: KVTransferStats) -> None:
        """Write what became of early loads into statistics."""
        early = self.early
        stats.early_loads, stats.early_loads_now = early.begun, len(early)
        stats.early_loads_adopted, stats.early_loads_dropped = early.adopted, early.dropped
