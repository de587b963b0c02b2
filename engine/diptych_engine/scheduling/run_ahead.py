"""Plans a step while the one before it is running.

On a GPU a step is launched in less time than it takes, so the next one can wait in the device's
queue. Then the device never waits for scheduler, messages and sampling parameters (vLLM calls this
asynchronous scheduling). The tokens of the running step are not known on the host yet, but their
positions are. Every request is assumed to continue. For a request that ends with the running step,
one token is computed in vain, into a slot that nobody reads.

A step is planned ahead only when no other plan is possible. As soon as a request may be admitted,
preempted or given a chunk of its prompt, the core waits for results and plans from them.
"""

from __future__ import annotations

from diptych_engine.scheduling.fair_rows import who_gives_way
from diptych_engine.scheduling.request import RequestStatus, ScheduledRequest, StepPlan
from diptych_engine.scheduling.scheduler import Scheduler


def plan_ahead(scheduler: Scheduler, plan: StepPlan) -> StepPlan | None:
    """Return the step after `plan`, whose results have not been applied yet; None if it depends on
    them."""
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
