"""Records how long requests waited for KV, and which engine sent it."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from diptych_kv_transfer.tables.load import Load
from diptych_protocol.engine_stats import HAND_OFF_BOUNDS_S, MAX_MOVES_TOLD, Move


@dataclass(slots=True)
class Waits:
    """The completed loads of one engine."""

    hand_off_counts: list[int] = field(default_factory=lambda: [0] * (len(HAND_OFF_BOUNDS_S) + 1))
    """Hand-offs by how long their requests waited, in the buckets of `HAND_OFF_BOUNDS_S`."""
    hand_off_seconds: float = 0.0
    prefix_seconds: float = 0.0
    moves: deque[Move] = field(default_factory=lambda: deque(maxlen=MAX_MOVES_TOLD))
    """The newest loads of both kinds."""
    num_moves: int = 0

    def saw(self, load: Load, seconds: float) -> None:
        """Record a completed load, and how long its request had waited."""
        if load.prefix is not None:
            self.prefix_seconds += seconds
        else:
            self.hand_off_counts[bisect_left(HAND_OFF_BOUNDS_S, seconds)] += 1
            self.hand_off_seconds += seconds
        self.num_moves += 1
        self.moves.append(
            Move(
                self.num_moves,
                load.lease.engine_id,
                load.num_blocks,
                seconds,
                load.moving_seconds,
                load.prefix is not None,
                load.request_id,
            )
        )
