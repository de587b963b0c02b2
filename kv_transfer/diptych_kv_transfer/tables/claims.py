"""What one reader of a lease asked for, and how much of it has been sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych_kv_transfer.tables.actions import Peer
from diptych_kv_transfer.tables.messages import Open, Run


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
