"""The queues of one engine core, its block pool, and every move of a request between them. Pure.

A request is in one place at a time, which its status names; each method here is one move, with the
blocks that it takes or gives back. Which moves a step makes is chosen in `scheduler.py`.

The effects that are asked for (starting a load) are values in `load_orders`; the engine core
carries them out and reports back through `load_ended`.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, field, replace

from diptych_engine.scheduling.adapter import busy_adapters
from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.early_loads import EarlyLoads, EarlyState
from diptych_engine.scheduling.encoder_cache import EncoderCache
from diptych_engine.scheduling.idle_sessions import IdleSessions
from diptych_engine.scheduling.journey import JourneyLog, Station
from diptych_engine.scheduling.lent_blocks import LentBlocks
from diptych_engine.scheduling.pause import PauseGate, is_under_way
from diptych_engine.scheduling.prefix_cache import PrefixCache
from diptych_engine.scheduling.request import (
    LoadOrder,
    Request,
    RequestStatus,
)
from diptych_engine.scheduling.waiting_queue import (
    FairQueue,
    make_queue,
    turn,
)
from diptych_frontend.fair_share import FairShare
from diptych_protocol import FinishReason, SchedulerStats, SchedulingPolicy

CREDIT_STEPS = 8
"""A tenant that comes back may be behind others by the tokens of so many steps: so long a prompt is
computed in one go, by all that prompts get of a step."""


@dataclass(slots=True)
class SchedulerState:
    """The queues of one engine core and its block pool, with the moves between them."""

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

    encoder: EncoderCache = field(default_factory=EncoderCache)
    """The images whose features are ready."""

    requests: dict[str, Request] = field(default_factory=dict)
    """Every unfinished request."""
    running: list[Request] = field(default_factory=list)
    """In the order of their shares; the last is the first to be preempted."""
    waiting: FairQueue = field(init=False)
    tenants: FairShare = field(init=False)
    """Who was served how much."""
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
    shared_until: int = 0
    """In the steps before this one several tenants are reckoned with."""

    def __post_init__(self) -> None:
        self.tenants = FairShare(CREDIT_STEPS * self.max_num_batched_tokens)
        self.waiting = make_queue(self.policy, self.tenants)
        self.idle = IdleSessions(self.max_idle_sessions)
        self.prefixes = PrefixCache(self.pool, self.block_size, self.enable_prefix_caching)
        self.early = EarlyLoads(self.pool, self.prefixes)
        self.leased = LentBlocks(self.pool)

    # --- requests come and go -----------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """In the queue, before it, and while everything is paused."""
        return len(self.waiting) + len(self.held) + len(self.gate.parked)

    def can_add(self, tenant: str = "") -> bool:
        """One more request may wait: there is room, or another tenant has more that wait."""
        if self.num_waiting < self.max_num_waiting:
            return True
        return bool(self.waiting) and len(self.waiting.longest()) > self.waiting.num_of(tenant) + 1

    def surplus(self) -> Request | None:
        """One to refuse after all, because too many wait: the newest of the tenant that has most
        waiting, of those whose client was told nothing yet."""
        if self.num_waiting <= self.max_num_waiting or not self.waiting:
            return None
        fresh = (r for r in reversed(self.waiting.longest()) if not is_under_way(r))
        return next(fresh, None)

    def add(self, request: Request) -> None:
        if request.request_id not in self.requests:
            self._enrol(request)
        self._tell(request, Station.QUEUED)
        early = None if self.gate.paused else self.early.pick_up(request)
        if early is None:
            self.gate.enter(request, self.waiting)
        else:
            self.go_on_from(early, request)

    def _enrol(self, request: Request) -> None:
        self.requests[request.request_id] = request
        request.account = self.tenants.open(request.tenant)

    def go_on_from(self, early: EarlyState, request: Request) -> None:
        """A request has the blocks that were reserved for it before it came."""
        self.prefixes.count_lookup(request, request.num_computed_tokens, self.stats)
        if early is EarlyState.LOADING:
            self._await_load(request)
        else:
            self._received(request, request.num_remote_tokens)
            self.waiting.push_front(request)

    def hold(self, request: Request) -> None:
        """Take a request in that cannot be queued before its grammar is there."""
        request.become(RequestStatus.WAITING_FOR_GRAMMAR)
        self._enrol(request)
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
        self.tenants.close(request.account)
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

    def load_ended(self, request_id: str, *, ok: bool, num_tokens: int = 0) -> Request | None:
        """The hinge no longer touches a request's blocks. num_tokens: the length of the prefix, if
        it was to fetch one.

        Returns the request if it failed and must be answered with an error. A prefix that was not
        fetched is no failure: it is computed here.
        """
        request = self.loading.pop(request_id, None)
        if request is None:
            self.early.ended(request_id, ok=ok)
            return None
        if request.finished:
            self._free_blocks(request)
            return None
        discarded = not request.fetches
        if discarded or not ok:
            may_compute = discarded or request.prefix_source is not None
            request.prefix_source = None
            self._tell(request, Station.KV_FAIL)
            self._free_blocks(request)
            request.become(RequestStatus.WAITING)
            self.waiting.push_front(request)
            return None if may_compute else request
        if request.prefix_source is None:
            self._received(request, request.num_remote_tokens)
        else:
            self._received(request, num_tokens)
            self._release_beyond(request)
        request.become(RequestStatus.WAITING)
        self.waiting.push_front(request)
        return None

    def go_on_without(self, request_id: str) -> None:
        """The prefix of a request does not come in time: it is computed in other blocks. Those that
        the hinge may still write to stay held, until `load_ended`."""
        request = self.loading.get(request_id)
        if request is None or request.prefix_source is None or request.finished:
            return
        held = replace(request, status=RequestStatus.FINISHED, images=())
        self.loading[request_id] = held
        request.block_ids, request.num_computed_tokens, request.prefix_source = [], 0, None
        self._tell(request, Station.KV_FAIL)
        request.become(RequestStatus.WAITING)
        self.waiting.push_front(request)

    def _received(self, request: Request, num_tokens: int) -> None:
        """The blocks of a request hold its first tokens, which the hinge was to fetch."""
        self.stats.remote_kv_tokens += request.take_over(num_tokens)
        self._tell(request, Station.KV_DONE)
        self.prefixes.remember(request, 0)

    # --- a step ---------------------------------------------------------------------------------

    def has_free_row(self) -> bool:
        """A row is free, or taken by a session that is idle."""
        taken = len(self.running) + self.idle.num_rows
        return taken < self.max_num_seqs or self.idle.longest_idle() is not None

    def has_room_for(self, request: Request) -> bool:
        """A row is free, and a place for the adapter, of those that no running request needs.

        Whoever lacks a place waits at the head of the queue: others must not overtake it for ever.
        """
        while len(self.running) + self.idle.num_rows >= self.max_num_seqs:
            if not self._reclaim_idle():
                return False
        needed = busy_adapters([*self.running, request]) | self.pinned_adapters
        return request.adapter is None or len(needed) <= self.max_loras

    def take_prefix(self, request: Request, hit: list[int], start: int) -> None:
        """Have a waiting request begin at `start`, with the remembered blocks that it was found."""
        if not request.block_ids:
            self.prefixes.count_lookup(request, len(hit) * self.block_size, self.stats)
        self.pool.take(hit)
        request.block_ids.extend(hit)
        request.num_computed_tokens = start

    def start(self, request: Request, end: int, beside: Request | None) -> None:
        """Have a request run, with blocks for its tokens up to `end`.

        beside: whose prompt is computed in pieces meanwhile, and who stays behind it.
        """
        needed = self.blocks_for(end) - len(request.block_ids)
        request.block_ids.extend(self.pool.allocate(max(0, needed)))
        request.become(RequestStatus.RUNNING)
        self._tell(request, Station.SCHEDULED)
        if self.policy == "priority":
            insort(self.running, request, key=turn)
        elif beside is not None:
            self.running.insert(self.running.index(beside), request)
        else:
            self.running.append(request)

    def reclaim_from_waiting(self) -> bool:
        """Take the blocks of the youngest request that waits with some; it will recompute.

        Without this, received requests could hold all blocks between them, each one block short.
        """
        for request in (*reversed(self.gate.parked), *reversed(self.waiting)):
            if request.block_ids and request is not self.waiting.peek():
                self._take_blocks(request)
                return True
        return self.early.reclaim_claimed()

    def reclaim_unused(self) -> bool:
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

    def order_load(self, request: Request) -> None:
        """Reserve the destination blocks of a hand-off and ask for what is missing."""
        num_local = len(request.block_ids)
        num_remote = self.blocks_for(request.num_remote_tokens)
        request.block_ids.extend(self.pool.allocate(max(0, num_remote - num_local)))
        self._await_load(request)
        names = None if request.prefix_source is None else self.prefixes.names(request)
        self.load_orders.append(LoadOrder.of(request, num_local, num_remote, names))

    def _await_load(self, request: Request) -> None:
        request.become(RequestStatus.WAITING_FOR_REMOTE_KV)
        self.loading[request.request_id] = request
        self._tell(request, Station.KV_WAIT)

    def preempt_all(self) -> None:
        """Take the blocks of every running request, and of those that wait with received KV."""
        while self.running:
            self._preempt(self.running[-1])
        while self._reclaim_idle():
            pass
        for request in (*self.waiting, *self.gate.parked):
            self._free_blocks(request)

    # --- blocks -------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def blocks_lacking(self, request: Request) -> int:
        """How many more blocks the tokens of a request need that it has so far."""
        return self.blocks_for(request.num_tokens) - len(request.block_ids)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Give a running request the blocks that so many tokens need, if need be those of others.

        Returns whether running requests were preempted for it; it may be among them itself.
        """
        short = self.blocks_for(num_tokens) - len(request.block_ids)
        preempted = False
        while short > self.pool.num_free:
            if self.reclaim_unused():
                continue
            preempted = True
            if self._preempt(self.running[-1]) is request:
                return preempted
        request.block_ids.extend(self.pool.allocate(short))
        return preempted

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Give a running request the blocks that so many tokens need; False if too few are free."""
        short = self.blocks_for(num_tokens) - len(request.block_ids)
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

    def _release_beyond(self, request: Request) -> None:
        """Give back the blocks that were reserved for more of a prefix than came."""
        count = self.blocks_for(request.num_computed_tokens)
        self.pool.release(request.block_ids[count:])
        del request.block_ids[count:]

    def _free_blocks(self, request: Request) -> None:
        if request.images:
            self.encoder.release(request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0
