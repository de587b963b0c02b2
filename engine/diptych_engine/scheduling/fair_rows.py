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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diptych_engine.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class FairPart:
    """The share of every tenant when all of them need theirs."""

    rows: int
    blocks: int
    num_held: Callable[[list[int]], int] = len
    """Counts the blocks in a request's list."""


def who_gives_way(
    running: Sequence[Request],
    request: Request,
    part: FairPart,
    *,
    lacks_row: bool,
    lacking: int,
    credit: float,
) -> Request | None:
    """Return the running request to preempt for another one; None: nobody.

    running: in the order of how much their tenants were served. lacking: the blocks that the other
    request lacks; 0: none. credit: tenants that were served less by up to this many tokens count as
    equal.
    """
    rows, blocks = _held(running, part.num_held)
    mine, lacks_blocks = request.account.tenant, lacking > 0
    if lacks_row and 2 * rows[mine] >= part.rows:
        return None
    if lacks_blocks and (2 * blocks[mine] >= part.blocks or blocks[mine] + lacking > part.blocks):
        return None
    for other in reversed(running):
        tenant = other.account.tenant
        too_much = (lacks_row and rows[tenant] > part.rows) or (
            lacks_blocks and blocks[tenant] > part.blocks
        )
        served_more = other.account.served >= request.account.served + credit / 2
        if too_much and served_more and other.priority >= request.priority:
            return other
    return None


def _held(
    running: Sequence[Request], num_held: Callable[[list[int]], int]
) -> tuple[Counter[str], Counter[str]]:
    """Rows and blocks by tenant."""
    rows, blocks = Counter[str](), Counter[str]()
    for request in running:
        rows[request.account.tenant] += 1
        blocks[request.account.tenant] += num_held(request.block_ids)
    return rows, blocks
