"""How waiting requests get into a step, beside the prompts that are computed already. Pure.

The next one to enter is the first of the queue, and when it lacks blocks, a row, or a place for its
adapter or its next image, all wait. Two rules besides:

- A step that holds `enough_prompt_tokens` begins no further prompt.
- A prompt that does not end with a step leaves up to half of its part to those that are done with
  it: shorter ones of its own tenant, or of one that was served less. They must leave it the blocks
  that it lacks still. So a short prompt never waits for the end of a long one, and the long one is
  done in twice the time at worst.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych_engine.scheduling.request import Request, ScheduledRequest
from diptych_engine.scheduling.scheduler_state import SchedulerState


@dataclass(slots=True)
class Step:
    """What is in a step so far, and what is left of it."""

    scheduled: list[ScheduledRequest]
    budget: int
    """Tokens that it may hold still."""
    enough: float
    """So many tokens of prompts, and it begins no further one."""
    prompts: int = 0
    """Tokens of prompts that it holds."""

    def room_for(self, tokens: int) -> int:
        """How many of a prompt that has begun it takes: after others', only up to enough."""
        room = min(tokens, self.budget)
        return int(min(room, self.enough - self.prompts)) if self.prompts else room

    def add(self, request: Request, start: int, count: int) -> None:
        samples = start + count == request.num_tokens and request.pooling is None
        self.scheduled.append(ScheduledRequest(request, start, count, samples))
        self.budget -= count
        self.prompts += count


def share_out(
    scheduler: SchedulerState,
    scheduled: list[ScheduledRequest],
    budget: int,
    chunks: list[tuple[Request, int]],
    *,
    admitting: bool,
) -> int:
    """Fill what decodes leave of a step with prompts. Returns what is left of the budget.

    chunks: prompts that have begun, and up to which token they have blocks.
    """
    most, enough = _most_and_enough(scheduler)
    spare = max(0, budget - most)
    step = Step(scheduled, budget - spare, enough)
    for request, end in chunks:
        if admitting:
            _admit(scheduler, step, before=request)
        start = request.num_computed_tokens
        count = step.room_for(end - start)
        if admitting and start + count < request.num_tokens:
            _admit_short(scheduler, step, request, count // 2)
            count = min(count, step.budget)
        if count > 0 and request.images:
            count = scheduler.encoder.fit(request, start, count)
        if count > 0:
            step.add(request, start, count)
    if admitting:
        _admit(scheduler, step)
    return step.budget + spare


def _most_and_enough(scheduler: SchedulerState) -> tuple[int, float]:
    """How many tokens of prompts a step holds at most, and how many are enough to begin no further
    one.

    Where more at a time are no faster, and several tenants have been here of late, these are a half
    and a quarter of what is enough else: the next prompt of one is not to wait for a long step of
    another.
    """
    most, enough = scheduler.max_num_batched_tokens, scheduler.enough_prompt_tokens
    if enough >= most or scheduler.stats.steps >= scheduler.shared_until:
        return most, enough
    return max(1, int(enough) // 2), max(1, int(enough) // 4)


def _admit(scheduler: SchedulerState, step: Step, before: Request | None = None) -> None:
    """Move waiting requests into the step while budget, rows and blocks last.

    Where more tokens at a time are no faster, a second prompt in a step would make the first one
    wait for it, and gain nothing.

    before: only those of tenants that were served less than this one's.
    """
    while scheduler.waiting and step.budget > 0 and step.prompts < step.enough:
        request = scheduler.waiting.peek()
        if before is not None and not _is_due_before(request, before):
            return
        if not _enter(scheduler, step, request, step.budget):
            return


def _admit_short(scheduler: SchedulerState, step: Step, beside: Request, room: int) -> None:
    """Move requests that need no more than `room` tokens to be done with their prompts into the
    step, beside one that is computed in pieces."""
    if not scheduler.waiting or not scheduler.has_free_row():
        return
    end, spared = step.budget - room, scheduler.blocks_lacking(beside)
    for request in list(scheduler.waiting):
        room = step.budget - end
        if room <= 0 or step.prompts >= step.enough:
            return
        if not _may_be_short(scheduler, request, room):
            continue
        if request.account is not beside.account and not _is_due_before(request, beside):
            continue
        if not _enter(scheduler, step, request, room, beside=beside, spared=spared):
            return


def _is_due_before(request: Request, other: Request) -> bool:
    """Another tenant's request is more urgent, or as urgent and that tenant was served less."""
    if request.priority != other.priority:
        return request.priority < other.priority
    return request.account.served < other.account.served


def _may_be_short(scheduler: SchedulerState, request: Request, room: int) -> bool:
    """By what is known without a look at the cache."""
    if request.fetches:
        return True
    known = max(request.num_computed_tokens, request.expected_hit * scheduler.block_size)
    return len(request.token_ids) - known <= room


def _enter(
    scheduler: SchedulerState,
    step: Step,
    request: Request,
    room: int,
    *,
    beside: Request | None = None,
    spared: int = 0,
) -> bool:
    """Give a waiting request at most `room` tokens of the step. False: there is no place for it,
    so that whoever waits behind it has to wait, too.

    beside: enter only if that is enough for all of its prompt, and `spared` blocks are left.
    """
    early = scheduler.early.pick_up(request)
    if early is not None:
        scheduler.waiting.remove(request)
        scheduler.go_on_from(early, request)
        return True
    hit = _find_room(scheduler, request, spared)
    if hit is None:
        return False
    start = request.num_computed_tokens or len(hit) * scheduler.block_size
    wanted = request.num_tokens - start
    if request.prefix_source is not None and not scheduler.prefixes.worth_fetching(request, start):
        request.prefix_source = None
    remote = request.fetches
    if not remote and beside is not None and wanted > room:
        return True  # it is not as short as it looked
    if not remote and not scheduler.has_room_for(request):
        return False
    count = min(wanted, room)
    if not remote and request.images:
        count = scheduler.encoder.fit(request, start, count)
        if count == 0:
            return False
    scheduler.waiting.remove(request)
    scheduler.take_prefix(request, hit, start)
    if remote:
        scheduler.order_load(request)
        return True
    scheduler.start(request, start + count, beside)
    step.add(request, start, count)
    return True


def _find_room(scheduler: SchedulerState, request: Request, spared: int) -> list[int] | None:
    """The remembered blocks of a request for which there are free blocks; None: there are not
    enough, whoever may be asked for some."""
    pool = scheduler.pool
    while True:
        # With blocks of its own, its KV came through the hinge.
        hit = [] if request.block_ids else scheduler.prefixes.find(request)
        short = scheduler.blocks_lacking(request) - len(hit) + spared
        if short <= pool.num_free - pool.num_free_among(hit):
            return hit
        if scheduler.reclaim_unused():
            continue
        if scheduler.running or not scheduler.reclaim_from_waiting():
            return None
