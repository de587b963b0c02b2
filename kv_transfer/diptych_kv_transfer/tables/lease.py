"""One lease of a prefill engine: its blocks, its state, its reader, and what that has asked for."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from diptych_kv_transfer.memory.shard import WHOLE, Part
from diptych_kv_transfer.tables.actions import Peer
from diptych_kv_transfer.tables.messages import Open, Run

NEVER = float("inf")
AT_ONCE = float("-inf")


@dataclass(frozen=True, slots=True)
class Batch:
    """Runs that travel together. The first has the tag `first`, the next ones those after it."""

    first: int
    runs: list[Run]
    """The runs, in blocks of the lease."""
    blocks: list[range]
    """The same runs, in blocks of the prefill engine's memory."""


@dataclass(slots=True)
class Claim:
    """A reader's claim on a lease."""

    peer: Peer
    asked: Open
    next_tag: int = field(init=False)
    pending: list[Run] = field(init=False)
    """Runs that have not been sent yet, in any order."""

    def __post_init__(self) -> None:
        self.next_tag = self.asked.tag
        self.pending = list(self.asked.runs)

    @property
    def tag(self) -> int:
        return self.asked.tag

    def repeats(self, peer: Peer, message: Open) -> bool:
        """Whether the message repeats the one that made this claim."""
        mine = self.asked
        return (peer, message.tag, message.digest, message.runs) == (
            self.peer, mine.tag, mine.digest, mine.runs
        )  # fmt: skip

    def keep_first(self, num_blocks: int) -> None:
        """Limit the claim to the blocks that the lease has; blocks beyond them are not sent."""
        self.pending = [
            (first, min(count, num_blocks - first))
            for first, count in self.pending
            if first < num_blocks
        ]

    def take_ready(self, block_ids: list[int]) -> Batch | None:
        """Remove from `pending` the runs, or parts of runs, whose blocks are ready, and return them
        as a batch to send; None if there are none. `block_ids`: the first blocks of the lease,
        which are ready."""
        ready = len(block_ids)
        due = [(first, min(count, ready - first)) for first, count in self.pending if first < ready]
        if not due:
            return None
        self.pending = [
            (max(first, ready), count - max(0, ready - first))
            for first, count in self.pending
            if first + count > ready
        ]
        batch = Batch(self.next_tag, [], [])
        for first, count in due:
            for index in range(first, first + count):
                _append(batch, index, block_ids[index], joins=index > first)
        self.next_tag += len(batch.runs)
        return batch


def _append(batch: Batch, index: int, block: int, *, joins: bool) -> None:
    """Add a block to a batch: to its last run if it follows that in both memories, or alone."""
    if joins and batch.blocks[-1].stop == block:
        first, count = batch.runs[-1]
        batch.runs[-1] = first, count + 1
        batch.blocks[-1] = range(batch.blocks[-1].start, block + 1)
    else:
        batch.runs.append((index, 1))
        batch.blocks.append(range(block, block + 1))


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
