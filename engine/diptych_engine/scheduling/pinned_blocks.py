"""Blocks that a next turn will need, by the tenant who said so.

A conversation, and each agent that branches off from it, begins its next turn with the tokens of
the last one. So its blocks are the session. Whoever says that a next turn will come *pins* them for
a while: they are forgotten after all others. A pin never keeps a block from whoever needs one.

A session that is to end has a name. Its end frees what no other session of the tenant has pinned
meanwhile: what an agent shares with those that branch off from it stays until its time is over.

What is said may be wrong. All pins together have room for `SHARE` of the blocks. When there are
more, those end first that nobody has come back to for `IDLE_S`, the oldest of all tenants, as they
would be forgotten if nobody pinned any. Then the tenant with the most loses its oldest. Those that
end are as if nothing had been said. So who pins too much takes nothing that is in use from a tenant
that pins less than an equal part. And those that pin nothing find what they would find in the rest
of the blocks, if nobody pinned any.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Final

SHARE: Final = 0.9
"""The part of all blocks that may be pinned."""
IDLE_S: Final = 10.0
"""Who has not come back for so long may not come back at all."""


Pin = tuple[float, float, str | None]
"""Since when and until when the block is pinned, and by which session; None: by several."""


class PinnedBlocks:
    """The pins of all tenants. Methods return the blocks that nobody pins any more, in the order in
    which they are to be forgotten: the oldest first, and of a prefix its end."""

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        """clock: returns seconds. Without pins nobody reads it."""
        self._room, self._clock = int(num_blocks * SHARE), clock
        self.count: Counter[int] = Counter()
        """How many tenants pin a block; only pinned ones are listed."""
        self._of: dict[str, OrderedDict[int, Pin]] = {}
        """Tenant -> block -> pin. The oldest come first."""
        self._look_at = self._shortest = math.inf
        """When pins may have lapsed, and the shortest time of any so far."""

    def add(self, tenant: str, block_ids: Sequence[int], seconds: float, session: str) -> list[int]:
        """Pin blocks for this long, or renew their pins. The first are forgotten first."""
        if not block_ids:
            return []
        now = self._clock()
        mine = self._of.setdefault(tenant, OrderedDict())
        for block in block_ids:
            until, alone = now + seconds, True
            former = mine.pop(block, None)
            if former is None:
                self.count[block] += 1
            else:
                until, alone = max(until, former[1]), former[2] == session
            mine[block] = now, until, session if alone else None
        self._look_at = min(self._look_at, now + seconds)
        self._shortest = min(self._shortest, seconds)
        return self.give_up(sum(map(len, self._of.values())) - self._room)

    def end(self, tenant: str, block_ids: Sequence[int], session: str) -> list[int]:
        """End the pins that only this session has set."""
        mine, freed = self._of.pop(tenant, OrderedDict[int, Pin]()), list[int]()
        for block in block_ids:
            if block in mine and mine[block][2] == session:
                self._end(block, mine, freed)
        if mine:
            self._of[tenant] = mine
        return freed

    def drop(self, block_ids: Collection[int]) -> list[int]:
        """End all pins of these blocks."""
        freed = list[int]()
        for tenant, mine in list(self._of.items()):
            for block in mine.keys() & block_ids:
                self._end(block, mine, freed)
            if not mine:
                del self._of[tenant]
        return freed

    def give_up(self, count: int) -> list[int]:
        """End `count` pins: those that nobody has renewed for `IDLE_S`, the oldest of all first,
        then the oldest of whoever has most of them."""
        freed, idle = list[int](), self._clock() - IDLE_S
        while count > 0 and self._of:
            tenant, mine = min(self._of.items(), key=_since)
            since = _since((tenant, mine))
            if since <= idle:
                few = next((n for n, pin in enumerate(mine.values()) if pin[0] > since), count)
            else:
                tenants = len(self._of)
                tenant, mine = max(self._of.items(), key=lambda item: len(item[1]))
                more = len(mine) - sum(map(len, self._of.values())) // tenants
                few = max(more, -(-count // tenants))
            few = min(few, count, len(mine))
            for _ in range(few):
                self._end(next(iter(mine)), mine, freed)
            if not mine:
                del self._of[tenant]
            count -= few
        return freed

    def lapsed(self) -> list[int]:
        """End the pins whose time is over; they are looked for every `IDLE_S` at most."""
        now, freed = self._clock(), list[int]()
        if now < self._look_at:
            return freed
        for tenant, mine in list(self._of.items()):
            old = takewhile(lambda item: item[1][0] + self._shortest <= now, mine.items())
            for block in [block for block, (_, until, _) in old if until <= now]:
                self._end(block, mine, freed)
            if not mine:
                del self._of[tenant]
        self._look_at = now + IDLE_S if self._of else math.inf
        return freed

    def _end(self, block: int, mine: dict[int, Pin], freed: list[int]) -> None:
        del mine[block]
        self.count[block] -= 1
        if not self.count[block]:
            del self.count[block]
            freed.append(block)


def _since(item: tuple[str, OrderedDict[int, Pin]]) -> float:
    return next(iter(item[1].values()))[0]
