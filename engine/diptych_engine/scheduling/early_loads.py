"""Blocks that are reserved for requests that are only announced, and filled before the requests
arrive.

    LOADING ──ok──▶ READY ──the request comes──▶ it has the blocks
       │              │
       │ given up     └── given up, needed by others, time ──▶ free
       ▼
    DROPPED ──ended──▶ free

The request may also arrive during the load, and then waits for its end as for any other. Blocks
become free only when the hinge reports that nothing writes to them any more.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.kv_groups import num_held
from diptych_engine.scheduling.prefix_cache import PrefixCache
from diptych_engine.scheduling.request import LoadOrder, Request
from diptych_protocol import KVTransferStats

MAX_LOADS = 256


class EarlyState(enum.Enum):
    LOADING = enum.auto()
    READY = enum.auto()
    DROPPED = enum.auto()


@dataclass(slots=True)
class EarlyLoad:
    """The load for a request to come."""

    announced: Request
    """What is known of the request. It holds the blocks, and is never scheduled."""
    state: EarlyState = EarlyState.LOADING
    claimed_by: Request | None = None
    """The request, if it has arrived but cannot be queued yet."""


@dataclass(slots=True)
class EarlyLoads:
    """All early loads of one engine, by the ids of their requests."""

    pool: BlockPool
    prefixes: PrefixCache
    loads: dict[str, EarlyLoad] = field(default_factory=dict)
    begun: int = 0
    adopted: int = 0
    dropped: int = 0

    def __len__(self) -> int:
        """The number of those whose request may still come."""
        return sum(load.state is not EarlyState.DROPPED for load in self.loads.values())

    @property
    def coming(self) -> list[Request]:
        """The announced requests whose blocks are on their way."""
        return [x.announced for x in self.loads.values() if x.state is EarlyState.LOADING]

    def reserve(self, announced: Request) -> LoadOrder | None:
        """Reserve blocks for a request to come; None if there is not enough room.

        A quarter of the pool stays free for running requests to grow, and announced requests never
        hold more than half. They may never come, so requests that are here come first.
        """
        if len(self.loads) >= MAX_LOADS:
            return None
        pool, kept = self.pool, self.prefixes.kept(announced.num_remote_tokens)
        hit = self.prefixes.find(announced)
        lacking = sum(place >= len(hit) for place in kept)
        free = pool.num_free - pool.num_free_among(hit) - lacking
        reserved = sum(num_held(load.announced.block_ids) for load in self.loads.values())
        if free < pool.num_blocks // 4 or reserved + len(kept) > pool.num_blocks // 2:
            return None
        pool.take(hit)
        announced.block_ids = hit + pool.allocate_for(kept, len(hit))
        announced.num_computed_tokens = self.prefixes.num_tokens(hit)
        self.loads[announced.request_id] = EarlyLoad(announced)
        self.begun += 1
        return LoadOrder.of(announced, len(hit), kept)

    def claim(self, request: Request) -> bool:
        """Assign a load to its request, which has arrived; False: nothing, or something else, was
        fetched for it."""
        load = self.loads.get(request.request_id)
        if load is None or load.state is EarlyState.DROPPED or not _same(load.announced, request):
            return False
        load.claimed_by = request
        return True

    def pick_up(self, request: Request) -> EarlyState | None:
        """Give the blocks of a claimed load to its request, which is queued now; None if there are
        none."""
        load = self.loads.get(request.request_id)
        if load is None or load.claimed_by is not request:
            return None
        del self.loads[request.request_id]
        self.adopted += 1
        announced = load.announced
        request.block_ids = announced.block_ids
        request.num_computed_tokens = announced.num_computed_tokens
        return load.state

    def ended(self, request_id: str, *, ok: bool) -> None:
        """Record that the hinge no longer touches a load's blocks, or nobody came for
        them in time."""
        load = self.loads.get(request_id)
        if load is None or (load.state is EarlyState.READY and load.claimed_by):
            return
        if ok and load.state is EarlyState.LOADING:
            load.state = EarlyState.READY
            return
        self.dropped += load.state is not EarlyState.DROPPED
        self._free(load)

    def drop(self, request_id: str) -> None:
        """Drop the load of a request that will not come, or is to compute its prompt here. A
        running load must be cancelled."""
        load = self.loads.get(request_id)
        if load is None or load.state is EarlyState.DROPPED:
            return
        self.dropped += 1
        if load.claimed_by is not None:
            load.claimed_by.kv_transfer = None
            load.claimed_by = None
        if load.state is EarlyState.READY:
            self._free(load)
        load.state = EarlyState.DROPPED

    def drop_all(self) -> list[str]:
        """Drop all loads, and return the ids of those that must be cancelled."""
        request_ids = list(self.loads)
        for request_id in request_ids:
            self.drop(request_id)
        return request_ids

    def reclaim(self) -> bool:
        """Free the oldest blocks that wait for their request; False if there are none."""
        for request_id, load in self.loads.items():
            if load.state is EarlyState.READY and load.claimed_by is None:
                self.drop(request_id)
                return True
        return False

    def reclaim_claimed(self) -> bool:
        """Free the youngest blocks whose request waits in the queue; it will compute its prompt.
        False if there are none."""
        for request_id, load in reversed(self.loads.items()):
            if load.state is EarlyState.READY and load.claimed_by is not None:
                self.drop(request_id)
                return True
        return False

    def count(self, stats: KVTransferStats) -> None:
        """Write what became of early loads into statistics."""
        stats.early_loads, stats.early_loads_now = self.begun, len(self)
        stats.early_loads_adopted, stats.early_loads_dropped = self.adopted, self.dropped

    def _free(self, load: EarlyLoad) -> None:
        self.pool.release(load.announced.block_ids)
        del self.loads[load.announced.request_id]


def _same(announced: Request, request: Request) -> bool:
    """What was fetched is what the request needs: same lease, tokens, images and salt."""
    promised, given = announced.kv_transfer, request.kv_transfer
    if promised is None or given is None:
        return False
    count = given.remote_num_tokens
    return (
        (promised.lease_id, promised.remote_num_tokens) == (given.lease_id, count)
        and announced.token_ids[:count] == request.token_ids[:count]
        and announced.kv_identity == request.kv_identity
    )
