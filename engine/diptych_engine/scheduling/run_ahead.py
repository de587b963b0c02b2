"""Plans a step while the one before it is under way. Pure.

On a GPU a step is launched in less time than it takes, so the next one can wait in the device's
queue: the device then never waits for scheduler, messages and sampling parameters (what vLLM calls
asynchronous scheduling). Its tokens are not known on the host yet, but their places are. Every
request is taken to go on; what ends with the step before is computed once more for nothing, one
token of it, into a slot that nobody reads.

It is planned only when nothing else could be: as soon as somebody may be admitted, preempted or
given a chunk of its prompt, the core waits for results and plans from what is known.
"""

from __future__ import annotations

from diptych_engine.scheduling.fair_rows import who_gives_way
from diptych_engine.scheduling.request import RequestStatus, ScheduledRequest, StepPlan
from diptych_engine.scheduling.scheduler import Scheduler


def plan_ahead(scheduler: Scheduler, plan: StepPlan) -> StepPlan | None:
    """The step after `plan`, whose results nobody has applied yet; None if that depends on them."""
    if scheduler.gate.frozen or _may_admit(scheduler):
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
        if not scheduler.reserve(request, end + 1):
            return None
        shares.append(ScheduledRequest(request, end, 1, samples=True))
    if not shares or num_running < len(scheduler.running):
        return None
    return StepPlan(shares, len(shares), removed=[], ahead=True)


def _may_admit(scheduler: Scheduler) -> bool:
    """Whether a waiting request may find room: with all rows taken only one that fetches its KV,
    which needs none yet, or another tenant's, to which somebody gives way."""
    if not scheduler.waiting:
        return False
    if scheduler.waiting.peek().fetches or len(scheduler.running) < scheduler.max_num_seqs:
        return True
    return who_gives_way(scheduler) is not None
