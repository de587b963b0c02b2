"""Chooses whose row and blocks are freed when another tenant's request finds none.

Every tenant with an open request has an equal share of rows and of blocks. While others do not need
theirs, a tenant may have more. Then its newest requests are preempted, those of the most served
tenant first, and computed again later (mostly found in the prefix cache). A tenant never loses its
own share. It gets rows in this way only if it has less than half of its share, and was served much
less. It gets the rest as rows end, because it is next in turn. So rows do not move back and forth
between tenants that always want more. One request per step gets room in this way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from diptych_engine.scheduling.request import Request
from diptych_engine.scheduling.scheduler_state import SchedulerState


def who_gives_way(scheduler: SchedulerState) -> Request | None:
    """Return the running request to preempt for the next waiting one; None: nobody.

    Running requests must be in the order of how much their tenants were served.
    """
    if not scheduler.waiting or not scheduler.tenants.several:
        return None
    request = scheduler.waiting.peek()
    lacks_row = not request.fetches and not scheduler.has_free_row()
    lacking = scheduler.blocks_lacking(request)
    lacks_blocks = not _are_free(scheduler, request, lacking)
    if not (lacks_row or lacks_blocks):
        return None
    rows, blocks = _held(scheduler.running)
    most_rows = max(1, scheduler.max_num_seqs // len(scheduler.tenants))
    most_blocks = scheduler.pool.num_blocks // len(scheduler.tenants)
    mine = request.account.tenant
    if lacks_row and 2 * rows[mine] >= most_rows:
        return None
    if lacks_blocks and (2 * blocks[mine] >= most_blocks or blocks[mine] + lacking > most_blocks):
        return None
    for other in reversed(scheduler.running):
        tenant = other.account.tenant
        too_much = (lacks_row and rows[tenant] > most_rows) or (
            lacks_blocks and blocks[tenant] > most_blocks
        )
        served_more = other.account.served >= request.account.served + scheduler.tenants.credit / 2
        if too_much and served_more and other.priority >= request.priority:
            return other
    return None


def _are_free(scheduler: SchedulerState, request: Request, lacking: int) -> bool:
    """Free blocks and remembered ones are as many as a waiting request lacks."""
    pool = scheduler.pool
    if lacking <= pool.num_free:
        return True
    hit = [] if request.block_ids else scheduler.prefixes.find(request)
    return lacking - len(hit) <= pool.num_free - pool.num_free_among(hit)


def _held(running: Iterable[Request]) -> tuple[Counter[str], Counter[str]]:
    """Rows and blocks by tenant."""
    rows, blocks = Counter[str](), Counter[str]()
    for request in running:
        rows[request.account.tenant] += 1
        blocks[request.account.tenant] += len(request.block_ids)
    return rows, blocks
