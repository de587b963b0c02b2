"""One request's hand-off as D sees it: from which lease, how far, and what is still missing."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from diptych_kv_transfer.memory.layout import Layout
from diptych_kv_transfer.memory.staging import Staging, plan_staging
from diptych_kv_transfer.tables.actions import Address, Fence, Peer
from diptych_kv_transfer.tables.messages import Hello, Open, Run
from diptych_protocol.kv_transfer_params import differences

NEVER, AT_ONCE = float("inf"), float("-inf")
MIN_LEASE_S, MAX_LEASE_S = 0.1, 3600.0
"""Leases outside are renewed as often as the shortest; their length comes from outside."""


class LoadState(enum.Enum):
    HOLDING = "holding"
    OPENING = "opening"
    RECEIVING = "receiving"
    CLOSING = "closing"
    STOPPING = "stopping"
    KEPT = "kept"


UNDER_WAY = frozenset(
    {LoadState.OPENING, LoadState.RECEIVING, LoadState.CLOSING, LoadState.STOPPING}
)


@dataclass(frozen=True, slots=True)
class LeaseRef:
    """Where a lease is, as `kv_transfer_params` name it."""

    lease_id: str
    address: Address
    engine_id: str
    epoch: str
    seconds: float = 30.0
    """How long it lasts without a sign of life."""

    @property
    def renew_every_s(self) -> float:
        return self.seconds / 3 if MIN_LEASE_S <= self.seconds <= MAX_LEASE_S else MIN_LEASE_S


@dataclass(slots=True)
class Remote:
    """The engine at an address, as far as we are in touch with it."""

    peer: Peer | None = None
    hello: Hello | None = None
    greet_by: float = NEVER
    """When it is cut off if it has not said who it is: rejects may wait for that."""

    def tick(self, now: float) -> list[Fence]:
        """What to do because time has passed."""
        if self.peer is None or self.greet_by > now:
            return []
        self.greet_by = NEVER
        return [Fence(self.peer)]


@dataclass(slots=True)
class Load:
    """One request's hand-off."""

    request_id: str
    lease: LeaseRef
    renew_at: float
    state: LoadState = LoadState.HOLDING
    deadline: float = NEVER
    """When it is overdue; `AT_ONCE`: the next `tick` sets it."""
    early: bool = False
    """Nobody waits for it yet: what goes wrong harms only it, and the lease outlives it."""
    waiting_since: float = 0.0
    """When somebody began to wait for it."""
    digest: str = ""
    tag: int = 0
    wanted: dict[int, int] = field(default_factory=dict)
    """Block of the lease -> block of ours, of those that are not on their way yet."""
    num_blocks: int = 0
    """How many of ours were wanted at first."""
    num_tokens: int = 0
    """Whose KV the lease is for."""
    staging: Staging | None = None
    """The peer's geometry is another one, or our blocks are on a device: `wanted` leads there, not
    to our blocks."""
    asked: bool = False
    """Open was sent."""
    batches: set[int] = field(default_factory=set)
    """First tags of everything that was announced."""
    receiving: set[int] = field(default_factory=set)
    """Those whose receives are posted and have not ended."""
    over: bool = False
    """P will send nothing more."""
    last_chance: bool = False
    """It was overdue or given up before: next, the connection is cut."""
    problem: str = ""
    """Why it cannot succeed any more."""

    def fit_to(self, theirs: Hello, mine: Hello, *, stages_all: bool = False) -> None:
        """Plan how to receive from an engine that `mismatch` has nothing against.

        stages_all: though its blocks may be like ours.
        """
        there, here = layout_of(theirs), layout_of(mine)
        direct = theirs.geometry == mine.geometry and not stages_all
        if self.staging is not None or direct or not self.wanted:
            return
        if there is not None and here is not None:
            self.staging = plan_staging(there, here, self.wanted, self.num_tokens)
            self.wanted = self.staging.places

    @property
    def staged(self) -> bool:
        """Its blocks do not come straight into ours."""
        return self.staging is not None

    @property
    def waits_for_room(self) -> bool:
        """It will be opened when there is room for what it brings."""
        return self.staged and not self.asked and self.state is LoadState.OPENING

    def ask(self) -> Open:
        """What asks P for the blocks; a load that waited for room is given its time now."""
        self.asked = True
        if self.deadline == NEVER:
            self.deadline = AT_ONCE
        runs = coalesce(self.wanted)
        return Open(self.lease.lease_id, self.digest, self.tag, runs, self.early)

    def take(self, runs: list[Run]) -> list[range]:
        """Where announced blocks belong, run by run.

        Raises `ValueError`, and takes nothing, for blocks that are not wanted (any more), or that
        are not neighbours here.
        """
        if sum(count for _, count in runs) > len(self.wanted):
            raise ValueError("it sends more than is wanted")
        places = []
        for first, count in runs:
            start = self.wanted.get(first, -1)
            for offset in range(count):
                if start < 0 or self.wanted.get(first + offset) != start + offset:
                    raise ValueError(f"it sends blocks {first}..{first + count - 1}, unasked")
            places.append(range(start, start + count))
        taken = {index for first, count in runs for index in range(first, first + count)}
        if len(taken) != sum(count for _, count in runs):
            raise ValueError("it sends a block twice")
        for index in taken:
            del self.wanted[index]
        return places


def next_to_stage(loads: Iterable[Load], room: int) -> list[tuple[Load, Staging]]:
    """Those of the loads that wait for room, in bytes, that can have it now.

    Those that somebody waits for come first, in their order; if none of them has room, the first
    may be of any size. Early ones never have more than a half, and none while others wait.
    """
    staged = [(load, load.staging) for load in loads if load.staging is not None]
    taken: Counter[bool] = Counter()
    """By whether they are early."""
    for load, staging in staged:
        if load.asked and load.state in UNDER_WAY:
            taken[load.early] += staging.num_bytes
    waiting = [(load, staging) for load, staging in staged if load.waits_for_room]
    chosen = []
    for load, staging in sorted(waiting, key=lambda pair: pair[0].early):
        fits = taken.total() + staging.num_bytes <= room
        if load.early:
            fits = fits and taken[True] + staging.num_bytes <= room // 2
        if not fits and (load.early or taken[False]):
            break
        taken[load.early] += staging.num_bytes
        chosen.append((load, staging))
    return chosen


def waiting_for_room(loads: Iterable[Load]) -> int:
    """How many of them."""
    return sum(load.waits_for_room for load in loads)


def layout_of(hello: Hello) -> Layout | None:
    """How an engine keeps its KV; None if it does not say so in a way that we understand."""
    return Layout.of(hello.compat, hello.geometry)


def coalesce(wanted: dict[int, int]) -> list[Run]:
    """Join neighbours into runs that are contiguous in the lease and in our memory.

    wanted: block of the lease -> block of ours.
    """
    runs: list[Run] = []
    stop = -1
    for index, block in wanted.items():
        if runs and index == sum(runs[-1]) and block == stop:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((index, 1))
        stop = block + 1
    return runs


def mismatch(lease: LeaseRef, theirs: Hello, mine: Hello) -> str:
    """Why the engine that answers is not the one the lease is from, or does not fit ours."""
    if theirs.version != mine.version:
        return f"the prefill engine speaks version {theirs.version}, we speak {mine.version}"
    if (theirs.engine_id, theirs.epoch) != (lease.engine_id, lease.epoch):
        return f"the prefill engine {lease.engine_id} was restarted or replaced"
    differing = differences(theirs.compat, mine.compat)
    if layout_of(theirs) is None or layout_of(mine) is None:
        differing += differences(theirs.geometry, mine.geometry)  # nobody could repack that
    return f"the engines cannot exchange KV ({'; '.join(differing)})" if differing else ""
