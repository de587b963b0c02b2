"""Decides what each step computes. Pure: values in, values out; no clock, torch or sockets.

There are no prefill and decode phases: a request that has tokens without KV gets a share of the
step's token budget, be it a chunk of its prompt or the one token it sampled last. Running requests
come first, in their order; when blocks run out the last of them loses its blocks and is computed
again later (preemption by recompute). Waiting requests follow. Under the policy `fcfs` the order is
that of arrival, and waiting requests whose KV came through the hinge go ahead of the others,
because they hold blocks already; under `priority` it is (priority, arrival, id) everywhere.

The effects that the scheduler asks for (starting a load) are returned as values; the engine core
carries them out and reports back through `load_ended`.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, field

from diptych_engine.block_pool import BlockPool
from diptych_engine.control.pause import PauseGate
from diptych_engine.early_loads import EarlyLoads, EarlyState
from diptych_engine.idle_sessions import IdleSessions
from diptych_engine.journey import JourneyLog, Station
from diptych_engine.lent_blocks import LentBlocks
from diptych_engine.lora.adapter import busy_adapters
from diptych_engine.prefix_cache import PrefixCache
from diptych_engine.request import (
    LoadOrder,
    Request,
    RequestStatus,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenOutput,
)
from diptych_engine.scheduler_stats import snapshot
from diptych_engine.step_results import apply_results
from diptych_engine.waiting_queue import WaitingQueue, make_queue, turn
from diptych_protocol import FinishReason, SchedulerStats, SchedulingPolicy


@dataclass(slots=True)
class Scheduler:
    """The queues of one engine core, and its block pool."""

    pool: BlockPool
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_waiting: int
    enable_prefix_caching: bool = True
    policy: SchedulingPolicy = "fcfs"
    max_idle_sessions: int = 64
    max_loras: int = 0
    """Different adapters that running requests and pinned ones may need together."""
    pinned_adapters: set[int] = field(default_factory=set)
    enough_prompt_tokens: float = math.inf
    """A step that holds so many begins no further prompt."""
    journey: JourneyLog | None = None
    """Is told what happens to requests, if anybody wants to know."""

    requests: dict[str, Request] = field(default_factory=dict)
    """Every unfinished request."""
    running: list[Request] = field(default_factory=list)
    """In the order of their shares; the last is the first to be preempted."""
    waiting: WaitingQueue = field(init=False)
    prefixes: PrefixCache = field(init=False)
    held: dict[str, Request] = field(default_factory=dict)
    """Requests whose grammars are being compiled."""
    loading: dict[str, Request] = field(default_factory=dict)
    """Requests whose blocks the hinge writes to, cancelled ones included."""
    idle: IdleSessions = field(init=False)
    early: EarlyLoads = field(init=False)
    """What the hinge fetches for requests that are only announced."""
    leased: LentBlocks = field(init=False)
    load_orders: list[LoadOrder] = field(default_factory=list)
    """Loads to start; the core takes them."""
    gate: PauseGate = field(default_factory=PauseGate)
    """Where requests wait that come during a pause."""
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    _removed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting = make_queue(self.policy)
        self.idle = IdleSessions(self.max_idle_sessions)
        self.prefixes = PrefixCache(self.pool, self.block_size, self.enable_prefix_caching)
        self.early = EarlyLoads(self.pool, self.prefixes)
        self.leased = LentBlocks(self.pool)

    # --- requests come and go -----------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """In the queue, before it, and while everything is paused."""
        return len(self.waiting) + len(self.held) + len(self.gate.parked)

    def can_add(self) -> bool:
        return self.num_waiting < self.max_num_waiting

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self._tell(request, Station.QUEUED)
        early = None if self.gate.paused else self.early.pick_up(request)
        if early is None:
            self.gate.enter(request, self.waiting)
        else:
            self._go_on_from(early, request)

    def _go_on_from(self, early: EarlyState, request: Request) -> None:
        """A request has the blocks that were reserved for it before it came."""
        self.prefixes.count_lookup(request, request.num_computed_tokens, self.stats)
        if early is EarlyState.LOADING:
            self._await_load(request)
        else:
            self._received(request)
            self.waiting.push_front(request)

    def hold(self, request: Request) -> None:
        """Take a request in that cannot be queued before its grammar is there."""
        request.become(RequestStatus.WAITING_FOR_GRAMMAR)
        self.requests[request.request_id] = request
        self.held[request.request_id] = request

    def queue_held(self, request: Request) -> None:
        del self.held[request.request_id]
        request.become(RequestStatus.WAITING)
        self.add(request)

    def finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a request from whatever state it is in and give its blocks back.

        While the hinge may still write to its blocks they stay held, until `load_ended`.
        """
        match request.status:
            case RequestStatus.FINISHED:
                return
            case RequestStatus.RUNNING:
                self.running.remove(request)
                self._removed.append(request.request_id)
            case RequestStatus.WAITING | RequestStatus.PREEMPTED:
                if request in self.gate.parked:
                    self.gate.parked.remove(request)
                else:
                    self.waiting.remove(request)
            case RequestStatus.WAITING_FOR_GRAMMAR:
                del self.held[request.request_id]
            case RequestStatus.WAITING_FOR_STREAMING_REQ:
                self.idle.remove(request)
                self._removed.append(request.request_id)
            case RequestStatus.WAITING_FOR_REMOTE_KV:
                pass
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self._tell(request, Station.FINISHED)
        if request.status is not RequestStatus.WAITING_FOR_REMOTE_KV:
            self._free_blocks(request)
        request.become(RequestStatus.FINISHED)
        del self.requests[request.request_id]

    def suspend(self, session: Request) -> Request | None:
        """Have a session wait for its next piece. Returns one to end, if there are too many."""
        self.running.remove(session)
        session.become(RequestStatus.WAITING_FOR_STREAMING_REQ)
        session.finish_reason = session.stop_reason = None
        return self.idle.add(session)

    def resume(self, session: Request) -> None:
        """Queue an idle session whose next piece has come, in front: it may hold blocks."""
        self.idle.remove(session)
        self._removed.append(session.request_id)  # what its row knows of it is outdated
        session.become(RequestStatus.WAITING)
        self.gate.enter(session, self.waiting, front=True)

    def load_ended(self, request_id: str, *, ok: bool) -> Request | None:
        """The hinge no longer touches a request's blocks.

        Returns the request if it failed and must be answered with an error.
        """
        request = self.loading.pop(request_id, None)
        if request is None:
            self.early.ended(request_id, ok=ok)
            return None
        if request.finished:
            self._free_blocks(request)
            return None
        discarded = request.kv_transfer is None
        if discarded or not ok:
            self._tell(request, Station.KV_FAIL)
            self._free_blocks(request)
            request.become(RequestStatus.WAITING)
            self.waiting.push_front(request)
            return None if discarded else request
        self._received(request)
        request.become(RequestStatus.WAITING)
        self.waiting.push_front(request)
        return None

    def _received(self, request: Request) -> None:
        """The blocks of a request hold what the hinge was to fetch."""
        self.stats.remote_kv_tokens += request.take_over()
        self._tell(request, Station.KV_DONE)
        self.prefixes.remember(request, 0)

    # --- a step -------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Choose the next step's work and allocate its blocks."""
        budget = allowed = 0 if self.gate.frozen else self.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        preempted = False
        block_size = self.block_size
        for request in self.running:  # only ever loses its last ones meanwhile
            if budget == 0:
                break
            start = request.num_computed_tokens
            known = end = len(request.token_ids)
            if end > start + budget:
                end = start + budget
            if end > len(request.block_ids) * block_size:
                preempted |= self._make_room(request, end)
                if request.status is not RequestStatus.RUNNING:
                    break
            samples = end == known and request.pooling is None
            scheduled.append(ScheduledRequest(request, start, end - start, samples))
            budget -= end - start
        if not preempted:
            budget = self._admit(scheduled, budget)
        removed, self._removed = self._removed, []
        return StepPlan(scheduled, allowed - budget, removed)

    def _admit(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        """Move waiting requests into the step while budget, rows and blocks last.

        Where more tokens at a time are no faster, a second prompt in a step would make the first
        one wait for it, and gain nothing.
        """
        if not self.waiting:
            return budget
        prompts = sum(share.num_tokens for share in scheduled if share.num_tokens > 1)
        while self.waiting and budget > 0 and prompts < self.enough_prompt_tokens:
            request = self.waiting.peek()
            early = self.early.pick_up(request)
            if early is not None:
                self._go_on_from(early, self.waiting.pop())
                continue
            if request.block_ids:  # its KV came through the hinge
                hit: list[int] = []
            else:
                hit = self.prefixes.find(request)
            start = request.num_computed_tokens or len(hit) * self.block_size
            known = request.num_tokens
            short = self._blocks_for(known) - len(hit) - len(request.block_ids)
            if short > self.pool.num_free - self.pool.num_free_among(hit):
                if self._reclaim_unused():
                    continue
                if not self.running and self._reclaim_from_waiting():
                    continue
                break
            remote = request.kv_transfer is not None and request.kv_transfer.do_remote_prefill
            if not remote and not self._has_room_for(request):
                break
            self.waiting.pop()
            if not request.block_ids:
                self.prefixes.count_lookup(request, len(hit) * self.block_size, self.stats)
            self.pool.take(hit)
            request.block_ids.extend(hit)
            request.num_computed_tokens = start
            if remote:
                self._order_load(request)
                continue
            count = min(known - start, budget)
            needed = self._blocks_for(start + count) - len(request.block_ids)
            request.block_ids.extend(self.pool.allocate(max(0, needed)))
            self._start(request)
            samples = start + count == known and request.pooling is None
            scheduled.append(ScheduledRequest(request, start, count, samples))
            budget -= count
            prompts += count
        return budget

    def _has_room_for(self, request: Request) -> bool:
        """A row is free, and a place for the adapter, of those that no running request needs.

        Whoever lacks a place waits at the head of the queue: others must not overtake it for ever.
        """
        while len(self.running) + self.idle.num_rows >= self.max_num_seqs:
            if not self._reclaim_idle():
                return False
        needed = busy_adapters([*self.running, request]) | self.pinned_adapters
        return request.adapter is None or len(needed) <= self.max_loras

    def _start(self, request: Request) -> None:
        request.become(RequestStatus.RUNNING)
        self._tell(request, Station.SCHEDULED)
        if self.policy == "priority":
            insort(self.running, request, key=turn)
        else:
            self.running.append(request)

    def _reclaim_from_waiting(self) -> bool:
        """Take the blocks of the youngest request that waits with some; it will recompute.

        Without this, received requests could hold all blocks between them, each one block short.
        """
        for request in (*reversed(self.gate.parked), *reversed(self.waiting)):
            if request.block_ids and request is not self.waiting.peek():
                self._take_blocks(request)
                return True
        return self.early.reclaim_claimed()

    def _reclaim_unused(self) -> bool:
        """Take blocks that nobody computes with now."""
        return self._reclaim_idle() or self.early.reclaim()

    def _reclaim_idle(self) -> bool:
        """Take the blocks and the row of the session that has been idle longest."""
        session = self.idle.longest_idle()
        if session is None:
            return False
        self._removed.append(session.request_id)
        self._take_blocks(session)
        return True

    def _order_load(self, request: Request) -> None:
        """Reserve the destination blocks of a hand-off and ask for what is missing."""
        num_local = len(request.block_ids)
        num_remote = self._blocks_for(request.num_remote_tokens)
        request.block_ids.extend(self.pool.allocate(max(0, num_remote - num_local)))
        self._await_load(request)
        self.load_orders.append(LoadOrder.of(request, num_local, num_remote))

    def _await_load(self, request: Request) -> None:
        request.become(RequestStatus.WAITING_FOR_REMOTE_KV)
        self.loading[request.request_id] = request
        self._tell(request, Station.KV_WAIT)

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenOutput]:
        """Apply a step's results. Requests that ended meanwhile get nothing more."""
        outputs = apply_results(plan, result, self.prefixes, self.stats)
        if self.journey is not None:
            self.journey.saw_tokens(outputs, self.stats.steps)
        return outputs

    def preempt_all(self) -> None:
        """Take the blocks of every running request, and of those that wait with received KV."""
        while self.running:
            self._preempt(self.running[-1])
        while self._reclaim_idle():
            pass
        for request in (*self.waiting, *self.gate.parked):
            self._free_blocks(request)

    # --- blocks -------------------------------------------------------------------------------

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Give a running request the blocks that so many tokens need, if need be those of others.

        Returns whether running requests were preempted for it; it may be among them itself.
        """
        short = self._blocks_for(num_tokens) - len(request.block_ids)
        preempted = False
        while short > self.pool.num_free:
            if self._reclaim_unused():
                continue
            preempted = True
            if self._preempt(self.running[-1]) is request:
                return preempted
        request.block_ids.extend(self.pool.allocate(short))
        return preempted

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Give a running request the blocks that so many tokens need; False if too few are free."""
        short = self._blocks_for(num_tokens) - len(request.block_ids)
        if short > self.pool.num_free:
            return False
        request.block_ids.extend(self.pool.allocate(max(0, short)))
        return True

    def _preempt(self, victim: Request) -> Request:
        self.running.remove(victim)
        self._removed.append(victim.request_id)
        self._take_blocks(victim)
        victim.become(RequestStatus.PREEMPTED)
        self.waiting.push_front(victim)
        return victim

    def _take_blocks(self, victim: Request) -> None:
        """For others; it computes its tokens again when its turn comes."""
        self._tell(victim, Station.PREEMPTED)
        self._free_blocks(victim)
        self.stats.num_preemptions += 1

    def _tell(self, request: Request, station: Station) -> None:
        if self.journey is not None:
            self.journey.record(request, station, self.stats.steps)

    def _free_blocks(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0

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
