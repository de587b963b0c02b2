"""What one reader of a lease asked for, and how much of it has been sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych_kv_transfer.tables.actions import Peer
from diptych_kv_transfer.tables.messages import Open, Run


@dataclass(frozen=True, slots=True)
class Batch:
    """Runs that travel together, under tags from `first` on, one up each."""

    first: int
    runs: list[Run]
    """In blocks of the lease."""
    blocks: list[range]
    """The same in P's memory."""


@dataclass(slots=True)
class Claim:
    """A reader's hold on a lease."""

    peer: Peer
    asked: Open
    next_tag: int = field(init=False)
    pending: list[Run] = field(init=False)
    """Not sent yet, in any order."""

    def __post_init__(self) -> None:
        self.next_tag = self.asked.tag
        self.pending = list(self.asked.runs)

    @property
    def tag(self) -> int:
        return self.asked.tag

    def repeats(self, peer: Peer, message: Open) -> bool:
        """The message is the one that made this claim, come again."""
        mine = self.asked
        return (peer, message.tag, message.digest, message.runs) == (
            self.peer, mine.tag, mine.digest, mine.runs
        )  # fmt: skip

    def take_ready(self, block_ids: list[int]) -> Batch | None:
        """Of what is pending, the part among the first blocks of the lease; None: nothing."""
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
    """Add a block, to the last run if that goes on with it in both memories."""
    if joins and batch.blocks[-1].stop == block:
        first, count = batch.runs[-1]
        batch.runs[-1] = first, count + 1
        batch.blocks[-1] = range(batch.blocks[-1].start, block + 1)
    else:
        batch.runs.append((index, 1))
        batch.blocks.append(range(block, block + 1))
