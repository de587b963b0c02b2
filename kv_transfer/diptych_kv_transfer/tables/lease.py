"""One lease of a prefill engine: its blocks, its state, and its reader."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from diptych_kv_transfer.memory.shard import WHOLE, Part
from diptych_kv_transfer.tables.actions import Peer
from diptych_kv_transfer.tables.claims import Claim

NEVER = float("inf")
AT_ONCE = float("-inf")


class LeaseState(enum.Enum):
    PROMISED = "promised"
    GRANTED = "granted"
    READING = "reading"
    RELEASED = "released"
    REVOKED = "revoked"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"


LIVE = frozenset({LeaseState.PROMISED, LeaseState.GRANTED, LeaseState.READING})
TRANSITIONS: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.PROMISED: frozenset({LeaseState.GRANTED, LeaseState.WITHDRAWN}),
    LeaseState.GRANTED: frozenset({LeaseState.READING, LeaseState.REVOKED, LeaseState.EXPIRED}),
    LeaseState.READING: frozenset(
        {LeaseState.GRANTED, LeaseState.RELEASED, LeaseState.REVOKED, LeaseState.EXPIRED}
    ),
    LeaseState.RELEASED: frozenset(),
    LeaseState.REVOKED: frozenset(),
    LeaseState.EXPIRED: frozenset(),
    LeaseState.WITHDRAWN: frozenset(),
}


@dataclass(frozen=True, slots=True)
class LeftLease:
    """A granted lease that an engine has left to the next one, which has all of its blocks."""

    lease_id: str
    epoch: str
    digest: str
    block_ids: list[int]


@dataclass(slots=True)
class Lease:
    """The right of an engine that knows the lease's id and tokens to read some blocks."""

    lease_id: str
    request_id: str
    digest: str
    num_blocks: int
    """The final number of the lease's blocks."""
    block_ids: list[int] = field(default_factory=list)
    """The blocks whose KV is computed already: the first blocks of the lease."""
    expires_at: float = NEVER
    state: LeaseState = LeaseState.PROMISED
    claim: Claim | None = None
    """The claim of the reader that reads it now; a promised lease may have one, too."""
    sending: dict[int, Peer] = field(default_factory=dict)
    """First tag -> receiver, of the sends in flight."""
    fence_at: float = NEVER
    """When to cut off readers of an ended lease's blocks; `AT_ONCE`: the next `tick` sets it."""
    is_prefix: bool = False
    """Whether its blocks are cached ones, which a reader has asked for by name."""
    part: Part = WHOLE
    """The part of each block that may be read; not the whole block if this is a share."""

    def become(self, state: LeaseState) -> None:
        """Change the state. An illegal transition raises and changes nothing."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"lease of {self.request_id}: {self.state} -> {state}")
        self.state = state

    @property
    def deadline(self) -> float:
        """When the lease next needs an action; infinity means never."""
        return self.expires_at if self.state in LIVE else self.fence_at
