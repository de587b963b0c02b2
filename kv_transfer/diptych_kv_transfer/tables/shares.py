"""Shares of a lease: several ranks of another engine read the same blocks.

Each rank of an engine with several hinges lends its blocks under one lease. If the other engine has
more ranks, several of them read this lease: each reads its slice of every block, or all read the
whole block if they need the same heads. Each reader then has a *share*. A share is a lease of its
own: it is opened, renewed, closed and rejected by its own name. The engine gets its blocks back
when all shares have ended. The first message that names a share divides the lease. This module
performs no I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from diptych_kv_transfer.memory.shard import Part
from diptych_protocol.engine_settings import MAX_RANKS

_NAME = re.compile(r"(.+)/(\d{1,3})/(\d{1,3})/(\d{1,3})", re.DOTALL)
RELEASED = "released"


class Share(NamedTuple):
    """The part of a lease that one of several readers gets."""

    lease_id: str
    """The lease that it is a share of."""
    reader: int
    readers: int
    slices: int
    """The number of slices into which the readers divide each block. If there are more readers than
    slices, adjacent readers get the same slice."""

    @property
    def name(self) -> str:
        """The id under which the reader opens its share."""
        return f"{self.lease_id}/{self.reader}/{self.readers}/{self.slices}"

    @property
    def part(self) -> Part:
        """The part of each block that the reader gets."""
        return Part(self.reader * self.slices // self.readers, self.slices)

    @property
    def all(self) -> list[Share]:
        """Return the shares of all readers."""
        return [self._replace(reader=reader) for reader in range(self.readers)]


def share_named(name: str) -> Share | None:
    """Return the share of this name; None if it is the name of a whole lease."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    lease_id, *numbers = found.groups()
    share = Share(lease_id, *map(int, numbers))
    possible = share.reader < share.readers <= MAX_RANKS and 1 <= share.slices <= share.readers
    if not possible or share.readers % share.slices or share.name != name:
        return None
    return share


def lease_of(name: str) -> str:
    """Return the lease of this name, or the one that the named share belongs to."""
    share = share_named(name)
    return name if share is None else share.lease_id


@dataclass(slots=True)
class Ended:
    """How a lease has ended."""

    lease_id: str
    outcome: str
    block_ids: list[int]
    """Its blocks, which nobody reads any more."""


@dataclass(slots=True)
class _Divided:
    left: list[str]
    """The names of the shares that have not ended."""
    outcome: str = RELEASED
    block_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class DividedLeases:
    """The leases that are divided, until all their shares have ended."""

    _leases: dict[str, _Divided] = field(default_factory=dict)

    def divide(self, share: Share) -> None:
        """Divide the lease that a share belongs to. It must not be divided yet."""
        self._leases[share.lease_id] = _Divided([other.name for other in share.all])

    def names(self, lease_id: str) -> list[str]:
        """Return a lease's shares that have not ended; the lease itself if it is whole."""
        divided = self._leases.get(lease_id)
        return [lease_id] if divided is None else list(divided.left)

    def ended(self, name: str, outcome: str, block_ids: list[int]) -> Ended | None:
        """Record that a lease or a share has ended, and nobody reads its blocks any more.

        Returns the lease if it has ended too; its outcome is `released` only if that of every share
        is. None: other shares have not ended.
        """
        lease_id = lease_of(name)
        divided = self._leases.get(lease_id)
        if divided is None:
            return Ended(name, outcome, block_ids)
        divided.left.remove(name)
        if divided.outcome == RELEASED:
            divided.outcome = outcome
        divided.block_ids = max(divided.block_ids, block_ids, key=len)
        if divided.left:
            return None
        del self._leases[lease_id]
        return Ended(lease_id, divided.outcome, divided.block_ids)
