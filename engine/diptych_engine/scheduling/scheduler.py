"""Decides what each step computes: the queues of one engine core, its block pool, and every move of
a request between them. It performs no I/O, and uses no clock, torch or sockets.

A request is in one place at a time, which its status names. Each method that moves one also takes
or frees its blocks. Requested effects (starting a load) are values in `load_orders`; the engine
core carries them out and reports back through `load_ended`. Lent blocks, early loads, changes of
the pool and images are tracked by the code that uses them.

There are no prefill and decode phases. A request that has tokens without KV gets a share of the
step's token budget, whether a chunk of its prompt or its last sampled token. Running requests come
first, in their order. When blocks run out, the last of them loses its blocks and is computed again
later (preemption by recompute). Waiting requests follow. Under the policy `fcfs` they are ordered
by arrival, and waiting requests whose KV came from another engine precede the others, because they
hold blocks already. Under `priority` the order is (priority, arrival, id) everywhere.

The next request to enter is the first of the queue. If it lacks blocks, a row, or a place for its
adapter or its next image, all wait. Two more rules apply:

- A step that holds `enough_prompt_tokens` begins no further prompt.
- A prompt that does not end with a step leaves up to half of its share to prompts that do: shorter
  ones of its own tenant, or of one that was served less. They must leave it the blocks that it
  still lacks. So a short prompt never waits for the end of a long one, and the long one takes at
  most twice its time.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from diptych_engine.scheduling.adapter import busy_adapters
from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.early_loads import EarlyLoads, EarlyState
from diptych_engine.scheduling.encoder_cache import EncoderCache
from diptych_engine.scheduling.fair_rows import FairPart, who_gives_way
from diptych_engine.scheduling.guesses import (
    DRAFTS_ARE_RIGHT,
    LOOK_AGAIN,
    TO_DRAFT,
    Guesser,
    Stakes,
    pay,
    rows_of_guess,
    worthwhile,
)
from diptych_engine.scheduling.journey import JourneyLog, Station
from diptych_engine.scheduling.kv_groups import NULL_BLOCK, num_held
from diptych_engine.scheduling.lent_blocks import LentBlocks
from diptych_engine.scheduling.pause import PauseGate, is_under_way
from diptych_engine.scheduling.prefix_cache import PrefixCache
from diptych_engine.scheduling.request import (
    LoadOrder,
    Request,
    RequestStatus,
    ScheduledRequest,
    StepPlan,
    StepResult,
    StoredPrefix,
    TokenOutput,
)
from diptych_engine.scheduling.step_results import apply_results
from diptych_engine.scheduling.waiting_queue import (
    FairQueue,
    IdleSessions,
    make_queue,
    service,
    turn,
    turn_in_class,
)
from diptych_frontend.fair_share import FairShare
from diptych_protocol import (
    FinishReason,
    PauseMode,
    RequestJourneyEvent,
    SchedulerStats,
    SchedulingPolicy,
    SpeculativeConfig,
)
from diptych_protocol.admin import DrainReport
from diptych_protocol.engine_stats import MAX_HOLDERS_TOLD, MAX_TENANTS_TOLD, Holder

CREDIT_STEPS = 8
"""A returning tenant may be behind others by the tokens of this many steps, so that a prompt of
this length is computed without interruption."""
SHARED_STEPS = 1000
"""How many further steps stay short after there were several tenants: some minutes."""


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The state of a scheduler at one moment. Making it reads all waiting requests, so it is made
    only when somebody pauses or drains the engine. Values needed in every step are properties of
    the scheduler."""

    num_running: int
    num_waiting: int
    """Requests in the queue, before it, and parked during a pause."""
    num_loading: int
    """Requests whose blocks are being received."""
    num_idle: int
    """Sessions that wait for their next piece."""
    num_leases: int
    """Leases that hold blocks."""
    any_begun: bool
    """Whether any request runs, waits with KV, or was preempted."""

    def drain_report(self, *, draining: bool) -> DrainReport:
        """Return what still keeps the engine from ending, including sessions that wait for their
        users."""
        waiting = self.num_waiting + self.num_loading + self.num_idle
        return DrainReport(
            draining=draining,
            drained=draining and not (self.num_running or waiting or self.num_leases),
            num_running=self.num_running,
            num_waiting=waiting,
            leases_held=self.num_leases,
        )


@dataclass(slots=True)
class Step:
    """The content of a step so far, and what is left of it."""

    scheduled: list[ScheduledRequest]
    budget: int
    """Tokens that it may still take."""
    enough: float
    """With this many tokens of prompts it begins no further one."""
    prompts: int = 0
    """Tokens of prompts that it holds."""

    def room_for(self, tokens: int) -> int:
        """Return how many tokens of a begun prompt it takes. After other prompts, it takes only up
        to enough."""
        room = min(tokens, self.budget)
        return int(min(room, self.enough - self.prompts)) if self.prompts else room

    def add(self, request: Request, start: int, count: int) -> None:
        samples = start + count == request.num_tokens and request.pooling is None
        self.scheduled.append(ScheduledRequest(request, start, count, samples))
        self.budget -= count
        self.prompts += count


@dataclass(slots=True)
class Scheduler:
    """Chooses what each step computes, and applies its results."""

    pool: BlockPool
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_waiting: int
    enable_prefix_caching: bool = True
    policy: SchedulingPolicy = "fcfs"
    max_idle_sessions: int = 64
    max_loras: int = 0
    """How many different adapters running requests and pinned ones may need together."""
    pinned_adapters: set[int] = field(default_factory=set)
    enough_prompt_tokens: float = math.inf
    """A step with this many begins no further prompt."""
    journey: JourneyLog | None = None
    """Records the events of requests, if anybody follows them."""
    speculation: SpeculativeConfig | None = None
    """Which tokens are guessed; None: none."""
    spare_rows: float = math.inf
    """See `guesses.worthwhile`."""
    lost_rows: float = 0.0
    """See `guesses.pay`."""
    draft_share: float = 0.0
    """See `guesses.rows_of_guess`."""
    stakes: Stakes | None = None
    """How much guesses may lose. None: they are wagered by estimates alone."""

    encoder: EncoderCache = field(default_factory=EncoderCache)
    """The images whose features are cached."""

    requests: dict[str, Request] = field(default_factory=dict)
    """Every unfinished request."""
    running: list[Request] = field(default_factory=list)
    """In the order of their shares. The last one is preempted first."""
    waiting: FairQueue = field(init=False)
    tenants: FairShare = field(init=False)
    """How much each tenant was served."""
    prefixes: PrefixCache = field(init=False)
    num_groups: int = field(init=False)
    """How many blocks a request has for the same tokens: one of each of the pool's groups."""
    windowed: bool = field(init=False)
    """Whether the windows of any group pass blocks, which are then released."""
    num_held: Callable[[list[int]], int] = field(init=False)
    """Counts the blocks of a request's list."""
    held: dict[str, Request] = field(default_factory=dict)
    """Requests whose grammars are being compiled."""
    loading: dict[str, Request] = field(default_factory=dict)
    """Requests whose blocks are being received, including cancelled ones."""
    idle: IdleSessions = field(init=False)
    early: EarlyLoads = field(init=False)
    """Loads for requests that are only announced."""
    leased: LentBlocks = field(init=False)
    load_orders: list[LoadOrder] = field(default_factory=list)
    """Loads to start, which the core takes."""
    _brought: list[Request] = field(default_factory=list)
    """See `StepPlan.brought`."""
    gate: PauseGate = field(default_factory=PauseGate)
    """Keeps requests that arrive during a pause."""
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    _removed: list[str] = field(default_factory=list)
    _must_wait: bool = False
    """Whether guesses keep the next step from being launched before the last one has ended: those
    of the last one, or those that it may have itself."""
    shared_until: int = 0
    """Steps before this one assume several tenants."""
    _order: Callable[[Request], Any] = field(init=False)
    """Sort key of running requests while there are several tenants."""

    def __post_init__(self) -> None:
        self.tenants = FairShare(CREDIT_STEPS * self.max_num_batched_tokens)
        self.waiting = make_queue(self.policy, self.tenants)
        self.idle = IdleSessions(self.max_idle_sessions)
        self.num_groups, self.windowed = self.pool.groups.count, self.pool.groups.windowed
        self.num_held = num_held if self.windowed else len
        self.prefixes = PrefixCache(self.pool, self.block_size, self.enable_prefix_caching)
        self.early = EarlyLoads(self.pool, self.prefixes)
        self.leased = LentBlocks(self.pool)
        self._order = turn_in_class if self.policy == "priority" else service

    # --- the choice of a step ------------------------------------------------------------------

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
        block_size, num_groups = self.block_size, self.num_groups
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
                if chunks and not self._reserve(request, end):
                    continue
            if end * num_groups > len(request.block_ids) * block_size:
                preempted |= self._make_room(request, end)
                if request.status is not RequestStatus.RUNNING:
                    break
            if known > start + 1:
                chunks.append((request, end))
                continue
            scheduled.append(ScheduledRequest(request, start, 1, request.pooling is None))
            budget -= 1
        if chunks or self.waiting:
            budget = self._share_out(scheduled, budget, chunks, admitting=not preempted)
        guessed, wager = 0, self._must_wait
        if self.speculation is not None and self._guesses(self.speculation, scheduled, budget):
            num_known = len(scheduled)
            scheduled = self._with_guesses(self.speculation, scheduled, budget)
            guessed = len(scheduled) - num_known
            wager = wager or guessed > 0
        self._must_wait = guessed > 0 and self.lost_rows > 0
        removed, self._removed = self._removed, []
        brought, self._brought = self._brought, []
        images = None if encoder.work is None else encoder.take_work()
        num_tokens = allowed - budget + guessed
        return StepPlan(
            scheduled,
            num_tokens,
            removed,
            images=images,
            guesses=guessed > 0,
            wager=wager,
            brought=brought,
        )

    def _guesses(
        self,
        settings: SpeculativeConfig,
        shares: Sequence[ScheduledRequest],
        budget: int,
        *,
        look: bool = False,
    ) -> dict[Request, list[int]]:
        """Return guesses of the next tokens of requests, none if they do not pay together.

        budget: what prompts and known tokens leave of the step. Requests and guesses together are
        never more than requests may run, so that a full batch has no guesses. look: else every
        request is taken to have as many guesses as it may, and they are not looked up; so a step
        where even these do not pay needs no look.
        """
        found: dict[Request, list[int]] = {}
        gain, running, drafts = 0.0, len(self.running), settings.drafts
        guessed = caught_up = 0
        if self.stakes is not None and running:
            budget = min(budget, self.stakes.most(running))
        if budget <= 0 or not running:
            return {}
        rows_of_each = rows_of_guess(self.draft_share, running, self.spare_rows)
        most_of_each = settings.num_speculative_tokens
        if drafts:  # a step of the draft model guesses for all: many of one take it longest
            most_of_each = min(most_of_each, max(1, budget // running))
        for share in shares:
            request = share.request
            known, rows = len(request.token_ids), running + guessed
            room = min(
                budget - guessed, self.max_num_seqs - rows, request.max_total_tokens - known - 1
            )
            decodes = share.samples and share.num_tokens == 1 and known > request.num_prompt_tokens
            if room <= 0 or not decodes:
                continue
            pause = LOOK_AGAIN if self.lost_rows else 0
            guesser = request.guesser = request.guesser or Guesser(
                pause=pause, at_first=DRAFTS_ARE_RIGHT if drafts else 0.0
            )
            if known < guesser.look_at:
                continue
            if not drafts:
                guesser.check(request.token_ids, settings)
            chance = guesser.chance(known)
            most = min(room, most_of_each)
            count = worthwhile(chance, rows, self.spare_rows, most, rows_of_each)
            guesses = [TO_DRAFT] * count
            if look and count and not drafts:
                guesses = guesser.guess(request.token_ids, settings, count).tolist()
            lacking = known - max(request.num_prompt_tokens, guesser.learned_at)
            if drafts and count and lacking > settings.num_speculative_tokens:
                # The draft model computes that in this step: for few, or the step lasts for long.
                if caught_up and caught_up + lacking > self.max_num_batched_tokens:
                    continue
                caught_up += lacking
            if guesses:
                found[request] = guesses
                guessed += count
                gain += sum(chance**i for i in range(1, count + 1))
        if pay(gain, guessed * rows_of_each, running, self.spare_rows, self.lost_rows):
            return found
        for request in found if look else ():
            if request.guesser is not None:
                request.guesser.look_at = len(request.token_ids) + request.guesser.pause
        return {}

    def _with_guesses(
        self, settings: SpeculativeConfig, shares: Sequence[ScheduledRequest], budget: int
    ) -> list[ScheduledRequest]:
        """Return the shares of a step and, after that of the token before, those of guesses. They
        get blocks that the step leaves."""
        found = self._guesses(settings, shares, budget, look=True)
        scheduled: list[ScheduledRequest] = []
        for share in shares:
            scheduled.append(share)
            request = share.request
            guesses, known = found.get(request, []), len(request.token_ids)
            if guesses and not self._reserve(request, known + len(guesses)):
                del guesses[self.prefixes.num_tokens(request.block_ids) - known :]
            scheduled += [
                ScheduledRequest(request, position, 1, samples=True, guess=token)
                for position, token in enumerate(guesses, known)
            ]
        return scheduled

    def _be_fair(self) -> None:
        """Serve those first who were served least, and take from those who were served most."""
        self.shared_until = self.stats.steps + SHARED_STEPS
        self.running.sort(key=self._order)
        while (victim := self._who_gives_way()) is not None:
            if not (self._has_free_row() and self._reclaim_unused()):
                self._preempt(victim)

    def _who_gives_way(self) -> Request | None:
        """Return the running request to preempt for the next waiting one; None: nobody.

        Running requests must be in the order of how much their tenants were served.
        """
        tenants = self.tenants
        if not self.waiting or not tenants.several:
            return None
        request = self.waiting.peek()
        if request.prefetches:
            return None
        lacks_row = not request.fetches and not self._has_free_row()
        lacking = self._blocks_lacking(request)
        lacks_blocks = not self._are_free(request, lacking)
        if not (lacks_row or lacks_blocks):
            return None
        part = FairPart(
            max(1, self.max_num_seqs // len(tenants)),
            self.pool.num_blocks // len(tenants),
            self.num_held,
        )
        return who_gives_way(
            self.running,
            request,
            part,
            lacks_row=lacks_row,
            lacking=lacking if lacks_blocks else 0,
            credit=tenants.credit,
        )

    def _are_free(self, request: Request, lacking: int) -> bool:
        """Free blocks and remembered ones are as many as a waiting request lacks."""
        pool = self.pool
        if lacking <= pool.num_free:
            return True
        hit = [] if request.block_ids else self.prefixes.find(request)
        return lacking - self.num_held(hit) <= pool.num_free - pool.num_free_among(hit)

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Return the step after `plan`, whose results have not been applied yet; None if it depends
        on them.

        On a GPU a step is launched in less time than it takes, so the next one can wait in the
        device's queue. Then the device never waits for scheduler, messages and sampling parameters
        (vLLM calls this asynchronous scheduling). The tokens of the running step are not known on
        the host yet, but their positions are. Every request is assumed to continue. For a request
        that ends with the running step, one token is computed in vain, into a slot that nobody
        reads. A step is planned ahead only when no other plan is possible. As soon as a request may
        be admitted, preempted or given a chunk of its prompt, the core waits for results and plans
        from them.
        """
        if self.gate.frozen or plan.guesses or self._may_admit():
            return None
        if self._looks_after(plan):
            self._must_wait = self.lost_rows > 0
            return None
        shares: list[ScheduledRequest] = []
        num_running = 0
        for share in plan.scheduled:
            request = share.request
            if request.status is not RequestStatus.RUNNING:
                continue
            num_running += 1
            if not share.samples:
                return None
            end = share.start + share.num_tokens
            if end + 1 >= request.max_total_tokens:
                continue
            if not self._reserve(request, end + 1):
                return None
            shares.append(ScheduledRequest(request, end, 1, samples=True))
        if not shares or num_running < len(self.running):
            return None
        return StepPlan(shares, len(shares), removed=[], ahead=True)

    def _looks_after(self, plan: StepPlan) -> bool:
        """Whether the step after this one is to wait for its tokens, because guesses may follow."""
        if self.speculation is None or not any(
            share.request.guesser is None or share.start + 1 >= share.request.guesser.look_at
            for share in plan.scheduled
        ):
            return False
        budget = self.max_num_batched_tokens - len(plan.scheduled)
        return bool(self._guesses(self.speculation, plan.scheduled, budget))

    def _may_admit(self) -> bool:
        """Whether a waiting request may find room: with all rows taken only one that fetches its
        KV, which needs none yet, or another tenant's, to which somebody gives way."""
        if not self.waiting:
            return False
        first = self.waiting.peek()
        if first.fetches or first.prefetches or len(self.running) < self.max_num_seqs:
            return True
        return self._who_gives_way() is not None

    def update(
        self, plan: StepPlan, result: StepResult, seconds: float | None = None
    ) -> list[TokenOutput]:
        """Apply a step's results. Requests that ended meanwhile get nothing more.

        seconds: since the step before it ended, or since it began after a rest, if it is known.
        """
        generated = self.stats.tokens_generated
        outputs = apply_results(plan, result, self.prefixes, self.stats)
        if self.stakes is not None and seconds is not None:
            num_shares = len(plan.scheduled)
            if 0 < num_shares == plan.num_tokens:  # a step with prompts takes longer
                guesses = sum(share.guess is not None for share in plan.scheduled)
                tokens = self.stats.tokens_generated - generated
                rows = num_shares - guesses
                self.stakes.took(rows, guesses, tokens, seconds, wager=plan.wager)
        if self.journey is not None:
            self.journey.saw_step(plan, outputs, self.stats.steps)
        return outputs

    # --- prompts enter a step ------------------------------------------------------------------

    def _share_out(
        self,
        scheduled: list[ScheduledRequest],
        budget: int,
        chunks: list[tuple[Request, int]],
        *,
        admitting: bool,
    ) -> int:
        """Fill what decodes leave of a step with prompts. Returns what is left of the budget.

        chunks: prompts that have begun, and up to which token they have blocks.
        """
        most, enough = self._most_and_enough()
        spare = max(0, budget - most)
        step = Step(scheduled, budget - spare, enough)
        for request, end in chunks:
            if admitting:
                self._admit(step, before=request)
            start = request.num_computed_tokens
            count = step.room_for(end - start)
            if admitting and start + count < request.num_tokens:
                self._admit_short(step, request, count // 2)
                count = min(count, step.budget)
            if count > 0 and request.images:
                count = self.encoder.fit(request, start, count)
            if count > 0:
                step.add(request, start, count)
        if admitting:
            self._admit(step)
        return step.budget + spare

    def _most_and_enough(self) -> tuple[int, float]:
        """How many tokens of prompts a step holds at most, and how many are enough to begin no
        further one.

        Where more at a time are no faster, and several tenants have been here of late, these are a
        half and a quarter of what is enough else: the next prompt of one is not to wait for a long
        step of another.
        """
        most, enough = self.max_num_batched_tokens, self.enough_prompt_tokens
        if enough >= most or self.stats.steps >= self.shared_until:
            return most, enough
        return max(1, int(enough) // 2), max(1, int(enough) // 4)

    def _admit(self, step: Step, before: Request | None = None) -> None:
        """Move waiting requests into the step while budget, rows and blocks last.

        Where more tokens at a time are no faster, a second prompt in a step would make the first
        one wait for it, and gain nothing.

        before: only those of tenants that were served less than this one's.
        """
        while self.waiting and step.budget > 0 and step.prompts < step.enough:
            request = self.waiting.peek()
            if before is not None and not _is_due_before(request, before):
                return
            if not self._enter(step, request, step.budget):
                return

    def _admit_short(self, step: Step, beside: Request, room: int) -> None:
        """Move requests that need no more than `room` tokens to be done with their prompts into the
        step, beside one that is computed in pieces."""
        if not self.waiting or not self._has_free_row():
            return
        end, spared = step.budget - room, self._blocks_lacking(beside)
        for request in list(self.waiting):
            room = step.budget - end
            if room <= 0 or step.prompts >= step.enough:
                return
            if not self._may_be_short(request, room):
                continue
            if request.account is not beside.account and not _is_due_before(request, beside):
                continue
            if not self._enter(step, request, room, beside=beside, spared=spared):
                return

    def _may_be_short(self, request: Request, room: int) -> bool:
        """By what is known without a look at the cache."""
        if request.fetches or request.prefetches:
            return True
        known = max(request.num_computed_tokens, request.expected_hit * self.block_size)
        return len(request.token_ids) - known <= room

    def _enter(
        self,
        step: Step,
        request: Request,
        room: int,
        *,
        beside: Request | None = None,
        spared: int = 0,
    ) -> bool:
        """Give a waiting request at most `room` tokens of the step. False: there is no place for
        it, so that whoever waits behind it has to wait, too.

        beside: enter only if that is enough for all of its prompt, and `spared` blocks are left.
        """
        if request.prefetches:
            self._bring(request)
            return True
        early = self.early.pick_up(request)
        if early is not None:
            self.waiting.remove(request)
            self._go_on_from(early, request)
            return True
        hit = self._find_room(request, spared)
        if hit is None:
            return False
        start = request.num_computed_tokens or self.prefixes.num_tokens(hit)
        if request.prefix_source is not None and not self.prefixes.worth_fetching(request, start):
            request.prefix_source = None
        remote = request.fetches
        part = None if remote else self.prefixes.part_behind(request, hit)
        if part is not None:
            hit, start = [*hit, part[0]], start + part[1]
        wanted = request.num_tokens - start
        if not remote and beside is not None and wanted > room:
            return True  # it is not as short as it looked
        if not remote and not self._has_room_for(request):
            return False
        count = min(wanted, room)
        if not remote and request.images:
            count = self.encoder.fit(request, start, count)
            if count == 0:
                return False
        self.waiting.remove(request)
        self._take_prefix(request, hit, start)
        if remote:
            self._order_load(request)
            return True
        self._start(request, start + count, beside)
        step.add(request, start, count)
        return True

    def _bring(self, request: Request) -> None:
        """Order what may be fetched for a prefetch, or end it with what is here. It takes no blocks
        from others that have some."""
        hit = [] if request.block_ids else self.prefixes.find(request)
        start = request.num_computed_tokens or self.prefixes.num_tokens(hit)
        fetches = request.fetches and self.prefixes.worth_fetching(request, start)
        self._take_prefix(request, hit, start)
        if fetches and self._blocks_lacking(request) <= self.pool.num_free:
            self.waiting.remove(request)
            self._order_load(request)
        else:
            self._end_prefetch(request)

    def _end_prefetch(self, request: Request) -> None:
        self._brought.append(request)
        self.finish(request, FinishReason.LENGTH)

    def _find_room(self, request: Request, spared: int) -> list[int] | None:
        """The remembered blocks of a request for which there are free blocks; None: there are not
        enough, whoever may be asked for some."""
        pool = self.pool
        if self.windowed:
            self._release_passed(request)
        while True:
            # With blocks of its own, its KV came through the hinge.
            hit = [] if request.block_ids else self.prefixes.find(request)
            short = self._blocks_lacking(request) - self.num_held(hit) + spared
            if short <= pool.num_free - pool.num_free_among(hit):
                return hit
            if self._reclaim_unused():
                continue
            if self.running or not self._reclaim_from_waiting():
                return None

    # --- requests come and go -----------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """The number of requests in the queue, before it, and parked during a pause."""
        return len(self.waiting) + len(self.held) + len(self.gate.parked)

    def can_add(self, tenant: str = "") -> bool:
        """Whether one more request may wait: there is room, or another tenant has more waiting
        requests."""
        if self.num_waiting < self.max_num_waiting:
            return True
        return bool(self.waiting) and len(self.waiting.longest()) > self.waiting.num_of(tenant) + 1

    def surplus(self) -> Request | None:
        """Return a request to refuse after all, because too many wait: the newest of the tenant
        with the most, among those whose client has no output yet."""
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
            self._go_on_from(early, request)

    def will_remember(self, request_id: str) -> list[bytes]:
        """Do the same as `PrefixCache.will_remember`; none for a request that was not admitted."""
        request = self.requests.get(request_id)
        return [] if request is None else self.prefixes.will_remember(request)

    def _enrol(self, request: Request) -> None:
        self.requests[request.request_id] = request
        request.account = self.tenants.open(request.tenant)

    def _go_on_from(self, early: EarlyState, request: Request) -> None:
        """A request has the blocks that were reserved for it before it came."""
        self.prefixes.count_lookup(request, request.num_computed_tokens, self.stats)
        if early is EarlyState.LOADING:
            self._await_load(request)
        else:
            self._received(request, request.num_remote_tokens)
            self.waiting.push_front(request)

    def hold(self, request: Request) -> None:
        """Add a request that cannot be queued before its grammar is compiled."""
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
        """End a request from any state and free its blocks.

        Blocks that are being received stay held until `load_ended`.
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
            if request.pin_s or request.session:
                told = request.tenant, request.pin_s, request.session
                self.pool.pin(request.block_hashes, *told)
            self._free_blocks(request)
        if self.pool.unsaved is not None:
            self.pool.unsaved.append(request.block_hashes)
        request.become(RequestStatus.FINISHED)
        self.tenants.close(request.account)
        del self.requests[request.request_id]
        if request.session and not request.pin_s:
            self._end_session(request)

    def _end_session(self, last: Request) -> None:
        """End what is brought for a next turn that will not come."""
        for other in [*self.requests.values()]:
            if other.prefetches and (other.tenant, other.session) == (last.tenant, last.session):
                other.pin_s, other.session = 0, ""
                self._end_prefetch(other)

    def suspend(self, session: Request) -> Request | None:
        """Let a session wait for its next piece. Returns a session to end, if there
        are too many."""
        self.running.remove(session)
        session.become(RequestStatus.WAITING_FOR_STREAMING_REQ)
        session.finish_reason = session.stop_reason = None
        return self.idle.add(session)

    def resume(self, session: Request) -> None:
        """Queue an idle session whose next piece has come, at the front, because it may hold
        blocks."""
        self.idle.remove(session)
        self._removed.append(session.request_id)  # what its row knows of it is outdated
        session.become(RequestStatus.WAITING)
        self.gate.enter(session, self.waiting, front=True)

    def load_ended(self, request_id: str, *, ok: bool, num_tokens: int = 0) -> Request | None:
        """Record that a request's blocks are no longer being received. num_tokens: the length of
        the prefix, for a request that fetched one.

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
        """Compute the prefix of a request in other blocks, because it does not arrive in time.
        Blocks that may still be written to stay held until `load_ended`."""
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
        """The blocks of a request hold its first tokens. Those of a prefix that another engine or a
        disk remembered count as cached; those of a hand-off were computed for this request."""
        source = request.prefix_source
        added = request.take_over(num_tokens)
        if source is not None:
            cached = min(request.num_computed_tokens, request.num_prompt_tokens)
            request.num_cached_tokens = max(cached, request.num_cached_tokens or 0)
        if isinstance(source, StoredPrefix):
            self.stats.disk_tokens += added
            request.num_received_tokens = 0
        else:
            self.stats.remote_kv_tokens += added
        self._tell(request, Station.KV_DONE)
        self.prefixes.remember(request, 0)

    # --- places and blocks of a step -----------------------------------------------------------

    def _has_free_row(self) -> bool:
        """A row is free, or taken by a session that is idle."""
        taken = len(self.running) + self.idle.num_rows
        return taken < self.max_num_seqs or self.idle.longest_idle() is not None

    def _has_room_for(self, request: Request) -> bool:
        """A row is free, and a place for the adapter, of those that no running request needs.

        Whoever lacks a place waits at the head of the queue: others must not overtake it for ever.
        """
        while len(self.running) + self.idle.num_rows >= self.max_num_seqs:
            if not self._reclaim_idle():
                return False
        needed = busy_adapters([*self.running, request]) | self.pinned_adapters
        return request.adapter is None or len(needed) <= self.max_loras

    def _take_prefix(self, request: Request, hit: list[int], start: int) -> None:
        """Have a waiting request begin at `start`, with the remembered blocks that it was found."""
        if not request.block_ids:
            if hit and request.num_cached_tokens is None:
                pinned = self.pool.num_pinned_among(hit) // self.num_groups
                request.num_pinned_tokens = pinned * self.block_size
            self.prefixes.count_lookup(request, start, self.stats)
        self.pool.take(hit)
        request.block_ids.extend(hit)
        request.num_computed_tokens = start

    def _start(self, request: Request, end: int, beside: Request | None) -> None:
        """Have a request run, with blocks for its tokens up to `end`.

        beside: whose prompt is computed in pieces meanwhile, and who stays behind it.
        """
        needed = self._blocks_for(end) - len(request.block_ids)
        request.block_ids.extend(self.pool.allocate(max(0, needed)))
        request.become(RequestStatus.RUNNING)
        self._tell(request, Station.SCHEDULED)
        if self.policy == "priority":
            insort(self.running, request, key=turn)
        elif beside is not None:
            self.running.insert(self.running.index(beside), request)
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
        num_local, kept = len(request.block_ids), self.prefixes.kept(request.num_remote_tokens)
        request.block_ids.extend(self.pool.allocate_for(kept, num_local))
        self._await_load(request)
        names = None if request.prefix_source is None else self.prefixes.names(request)
        self.load_orders.append(LoadOrder.of(request, num_local, kept, names))

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

    def _blocks_for(self, num_tokens: int) -> int:
        """How many places the list of a request has that has blocks for so many tokens."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def _blocks_lacking(self, request: Request) -> int:
        """How many more blocks the tokens of a request need at a time that it has so far."""
        if self.windowed:
            return self.pool.groups.most(request.num_tokens) - num_held(request.block_ids)
        return self._blocks_for(request.num_tokens) - len(request.block_ids)

    def _release_passed(self, request: Request) -> None:
        """Release the blocks of a request that no token attends to any more. The results of a step
        that is under way are not counted, so it still has all of its blocks."""
        block_ids, passed = request.block_ids, list[int]()
        for group, rows in enumerate(self.pool.groups.passed(request.num_computed_tokens)):
            for place in range((rows - 1) * self.num_groups + group, -1, -self.num_groups):
                if block_ids[place] == NULL_BLOCK:
                    break
                passed.append(block_ids[place])
                block_ids[place] = NULL_BLOCK
        self.pool.release(passed)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Give a running request the blocks that so many tokens need, if need be those of others.

        Returns whether running requests were preempted for it; it may be among them itself.
        """
        if self.windowed:
            self._release_passed(request)
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

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        """Give a running request the blocks that so many tokens need; False if too few are free."""
        short = self._blocks_for(num_tokens) - len(request.block_ids)
        if short > 0 and self.windowed:
            self._release_passed(request)
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
        count = self._blocks_for(request.num_computed_tokens)
        self.pool.release(request.block_ids[count:])
        del request.block_ids[count:]

    def _free_blocks(self, request: Request) -> None:
        if request.images:
            self.encoder.release(request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0

    # --- what others read ---------------------------------------------------------------------

    def view(self) -> SchedulerView:
        """Return the present state."""
        return SchedulerView(
            num_running=len(self.running),
            num_waiting=self.num_waiting,
            num_loading=len(self.loading),
            num_idle=len(self.idle),
            num_leases=len(self.leased),
            any_begun=bool(self.running) or any(map(is_under_way, self.waiting)),
        )

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something (or at least admit or end a request)."""
        return bool(self.running or self.waiting or self._brought) and not self.gate.frozen

    @property
    def quiet(self) -> bool:
        """Whether no step will compute anything, and nothing to compute is being received."""
        return self.gate.frozen or not (self.running or self.waiting or self.loading)

    @property
    def paused(self) -> bool:
        """Whether new requests wait for the end of a pause."""
        return self.gate.paused

    @property
    def can_finish_more(self) -> bool:
        """Whether any request is not parked, and steps are computed."""
        return len(self.requests) > len(self.gate.parked) and not self.gate.frozen

    @property
    def has_waiting(self) -> bool:
        """Whether any request waits in the queue."""
        return bool(self.waiting)

    @property
    def hinge_at_rest(self) -> bool:
        """Whether nothing is lent, and nothing is being fetched."""
        return not (self.loading or self.early.loads or len(self.leased))

    @property
    def now_running(self) -> Sequence[Request]:
        """The running requests. Copy the list to use it after this step."""
        return self.running

    @property
    def unfinished(self) -> Collection[Request]:
        """Every request that has not ended, in the order of arrival."""
        return self.requests.values()

    def find(self, request_id: str) -> Request | None:
        """Return the unfinished request of this id."""
        return self.requests.get(request_id)

    def is_loading(self, request_id: str) -> bool:
        """Whether blocks of a request of this id are being received, even if it has ended."""
        return request_id in self.loading

    def snapshot(self) -> SchedulerStats:
        """Return the running totals with the present gauges. The caller may change them."""
        queued = self.prefixes.queued_prompt_tokens(self.requests.values())
        coming = [*self.loading.values(), *self.early.coming]
        arriving = [self._told(x, self._blocks_for(x.num_computed_tokens)) for x in coming]
        awaited = zip(coming, arriving, strict=True)
        holders = [Holder(x.request_id, self._told(x)) for x in self.running[:MAX_HOLDERS_TOLD]]
        holders += [Holder(x.request_id, self._told(x), n) for x, n in awaited]
        return msgspec.structs.replace(
            self.stats,
            num_running=len(self.running),
            num_waiting=self.num_waiting,
            num_waiting_for_remote_kv=len(self.loading),
            num_waiting_for_input=len(self.idle),
            blocks_total=self.pool.num_blocks // self.num_groups,
            blocks_free=self.pool.num_free // self.num_groups,
            images_encoded=self.encoder.encoded,
            encoder_cache_hits=self.encoder.hits,
            encoder_cache_tokens=self.encoder.num_tokens,
            queued_prompt_tokens=queued.total(),
            queued_tokens_of=dict(queued.most_common(MAX_TENANTS_TOLD)) if any(queued) else {},
            blocks_remembered=self.pool.num_remembered // self.num_groups,
            blocks_arriving=sum(arriving),
            blocks_pinned=self.pool.num_pinned // self.num_groups,
            accepted_at=list(self.stats.accepted_at),
            holders=holders[:MAX_HOLDERS_TOLD],
        )

    def _told(self, request: Request, first: int = 0) -> int:
        """How many blocks a request has, from a place on, as others are told: of all layers."""
        return self.num_held(request.block_ids[first:]) // self.num_groups

    # --- pauses --------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Pause, or change the mode of the present pause."""
        self.gate.close(mode, self.waiting)

    def end_pause(self) -> None:
        """End the pause; parked requests join the queue. Harmless without a pause."""
        self.gate.open(self.waiting)

    def discard_loads(self) -> list[str]:
        """Use nothing that is being received; those requests compute their prompts here. Returns
        the ids of the loads to cancel."""
        for request in self.loading.values():
            request.forgo_remote()
        return [*self.loading, *self.early.drop_all()]

    def take_stations(self) -> dict[bytes, list[RequestJourneyEvent]]:
        """Return the events of requests since the last call, by client, if anybody follows them."""
        return {} if self.journey is None else self.journey.take()

    def take_load_orders(self) -> list[LoadOrder]:
        """Return the loads to start now, once."""
        orders, self.load_orders = self.load_orders, []
        return orders


def _is_due_before(request: Request, other: Request) -> bool:
    """Another tenant's request is more urgent, or as urgent and that tenant was served less."""
    if request.priority != other.priority:
        return request.priority < other.priority
    return request.account.served < other.account.served
