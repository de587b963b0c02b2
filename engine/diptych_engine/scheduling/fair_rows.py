"""Whose row and blocks give way when another tenant's request finds none. Pure.

Every tenant with an open request has an equal part of rows and of blocks. As long as others do not
want theirs, anybody may have more; then the newest requests of those with more give way, the most
served tenant's first, and are computed again later (mostly found in the prefix cache). What a
tenant has up to its part is never taken for this, and only who has less than half of his part, and
was served much less, is given anything: the rest comes to him as rows end, because it is his turn.
So nothing goes to and fro between those who always want more. One request a step gets room so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from diptych_engine.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Part:
    """What every tenant may have, however many want more."""

    rows: int
    blocks: int


def who_gives_way(
    running: Sequence[Request],
    request: Request,
    part: Part,
    *,
    lacks_row: bool,
    lacking: int,
    credit: float,
) -> Request | None:
    """The running request whose row and blocks another is to have; None: nobody.

    running: in the order of what their tenants were served.
    lacking: the blocks that the other lacks; 0: none.
    credit: by how many tokens somebody may have been served less than others, and count as equal.
    """
    rows, blocks = _held(running)
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


def _held(running: Sequence[Request]) -> tuple[Counter[str], Counter[str]]:
    """Rows and blocks by tenant."""
    rows, blocks = Counter[str](), Counter[str]()
    for request in running:
        rows[request.account.tenant] += 1
        blocks[request.account.tenant] += len(request.block_ids)
    return rows, blocks
