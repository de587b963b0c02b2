"""One request's load on the decode engine: its lease, its state, the missing blocks."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from diptych_kv_transfer.memory.layout import Layout
from diptych_kv_transfer.memory.shard import WHOLE, Part
from diptych_kv_transfer.memory.staging import AnyStaging, StagedCopies, plan_staging
from diptych_kv_transfer.tables.actions import Address, Fence, Peer
from diptych_kv_transfer.tables.messages import Hello, Open, Opened, Run
from diptych_kv_transfer.tables.shares import share_named
from diptych_protocol.engine_stats import HAND_OFF_BOUNDS_S, MAX_MOVES_TOLD, Move
from diptych_protocol.kv_transfer_params import differences

NEVER, AT_ONCE = float("inf"), float("-inf")
MIN_LEASE_S, MAX_LEASE_S = 0.1, 3600.0
"""A lease whose length is outside these limits is renewed as often as the shortest one. The length
comes from the peer and is not trusted."""


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
    """Where a lease is, as named in `kv_transfer_params`."""

    lease_id: str
    address: Address
    engine_id: str
    epoch: str
    seconds: float = 30.0
    """How long the lease lasts without a renewal."""
    num_ranks: int = 1
    """How many ranks the engine has."""

    @property
    def renew_every_s(self) -> float:
        return self.seconds / 3 if MIN_LEASE_S <= self.seconds <= MAX_LEASE_S else MIN_LEASE_S


@dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks that another engine may remember, and that are fetched if it does."""

    names: list[bytes]
    """The names of its blocks, in the other engine's block size."""
    name_tokens: int
    """Number of tokens in a block of the other engine."""
    block_tokens: int
    """Number of tokens in one of our blocks."""
    first: int
    """The first of our blocks that lacks KV."""
    whole: int | None = None
    """How many blocks its lease has if it lacks those that windows have passed. Then it is lent
    whole, or not at all."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the names are of."""
        return len(self.names) * self.name_tokens

    def misfit(self, theirs: Hello) -> str:
        """Return why these are not the answering engine's blocks; empty if they are."""
        size = theirs.geometry.get("block_size", self.name_tokens)
        return "" if size == self.name_tokens else f"its blocks have {size} tokens"


@dataclass(slots=True)
class Remote:
    """The state of our connection to the engine at an address."""

    peer: Peer | None = None
    hello: Hello | None = None
    greet_by: float = NEVER
    """When the connection is cut if the peer has not said Hello. Rejects may wait for its Hello."""

    def tick(self, now: float) -> list[Fence]:
        """Return the actions that are due because time has passed."""
        if self.peer is None or self.greet_by > now:
            return []
        self.greet_by = NEVER
        return [Fence(self.peer)]


@dataclass(slots=True)
class Load:
    """The load of one request."""

    request_id: str
    lease: LeaseRef
    renew_at: float
    state: LoadState = LoadState.HOLDING
    deadline: float = NEVER
    """When the load is overdue. `AT_ONCE`: the next `tick` sets the deadline."""
    early: bool = False
    """The request has not arrived yet. A failure harms this load only; the lease outlives it."""
    waiting_since: float = 0.0
    """When the request began to wait for the load."""
    digest: str = ""
    tag: int = 0
    wanted: dict[int, int] = field(default_factory=dict)
    """Block of the lease -> our block, for blocks that the prefill engine has not announced yet."""
    num_blocks: int = 0
    """How many of our blocks were wanted at first."""
    num_tokens: int = 0
    """The number of tokens whose KV the lease is for."""
    part: Part = WHOLE
    """The part of each of our blocks that is filled. Other loads fill the other parts."""
    staging: AnyStaging | None = None
    """Set if the peer has another geometry or if our blocks are on a device. `wanted` then maps to
    blocks of the staging area, not to our own blocks."""
    asked: bool = False
    """Open was sent."""
    prefix: Prefix | None = None
    """Set if the prefill engine may have less than what is wanted, or nothing."""
    patience_s: float = NEVER
    """How long the load may take. `deadline` is when this time is over."""
    granted: bool = False
    """The prefill engine has said how much of the prefix it lends."""
    batches: set[int] = field(default_factory=set)
    """The first tag of every announced batch."""
    receiving: set[int] = field(default_factory=set)
    """The batches whose receives are posted and have not ended."""
    moving_since: float = 0.0
    """When `receiving` was empty last."""
    moving_seconds: float = 0.0
    """For how long it was not empty."""
    over: bool = False
    """The prefill engine will send nothing more."""
    last_chance: bool = False
    """The load was given up or was overdue once. If it is overdue again, the connection is cut."""
    problem: str = ""
    """Why the load cannot succeed any more; empty if it can."""
    at_first: dict[int, int] = field(default_factory=dict)
    """What was wanted at first."""
    back_by: float = NEVER
    """When the prefill engine that was lost must be back; infinity: it was not lost."""

    def fit_to(self, theirs: Hello, mine: Hello, copied_block_bytes: int = 0) -> None:
        """Plan how to receive from an engine for which `mismatch` found no problem.

        `copied_block_bytes`: see `LoadTable`.
        """
        if self.staging is not None or not self.wanted:
            return
        there, here = layout_of(theirs), layout_of(mine)
        if theirs.geometry == mine.geometry:
            if not copied_block_bytes:
                return
            blocks, ours = list(self.wanted), list(self.wanted.values())
            self.staging = StagedCopies(blocks, ours, copied_block_bytes, self.part)
        elif there is not None and here is not None:
            self.staging = plan_staging(there, here, self.wanted, self.num_tokens)
        if self.staging is not None:
            self.wanted = self.staging.places

    def begin_again(self) -> None:
        """Forget what has come from an engine that was lost: the next one sends it all again."""
        self.state, self.asked, self.last_chance, self.problem = LoadState.OPENING, False, False, ""
        self.staging, self.wanted = None, dict(self.at_first)
        self.batches.clear()

    @property
    def staged(self) -> bool:
        """Whether the blocks arrive in a staging area instead of in our own blocks."""
        return self.staging is not None

    @property
    def may_shorten(self) -> bool:
        """Whether blocks have arrived before the prefill engine has said how many it lends."""
        early = self.prefix is not None and not self.granted
        return early and self.state is LoadState.RECEIVING

    @property
    def waits_for_room(self) -> bool:
        """Whether the load waits for room in the staging areas before it is opened."""
        return self.staged and not self.asked and self.state is LoadState.OPENING

    def ask(self) -> Open:
        """Return the Open that asks for the blocks. A load that waited gets its deadline now."""
        self.asked = True
        if self.deadline == NEVER:
            self.deadline = AT_ONCE
        share = share_named(self.lease.lease_id)
        cut = self.part != WHOLE or (share is not None and share.slices > 1)
        # Parts of blocks do not follow each other in memory, on one of the two sides.
        runs = [(index, 1) for index in self.wanted] if cut else coalesce(self.wanted)
        names = [] if self.prefix is None else self.prefix.names
        return Open(self.lease.lease_id, self.digest, self.tag, runs, self.early, names)

    def shorten(self, prefix: Prefix, opened: Opened) -> None:
        """Wait only for the blocks of a prefix that the prefill engine lends.

        Raises `ValueError`, and changes nothing, if it lends nothing that was asked for.
        """
        count, num_tokens = opened.num_blocks, opened.num_blocks * prefix.name_tokens
        if prefix.whole is not None:
            if count != prefix.whole:
                raise ValueError(f"it lends {count} blocks of {prefix.whole}")
            self.granted = True
            return
        if count > len(prefix.names) or num_tokens <= prefix.first * prefix.block_tokens:
            raise ValueError(f"it lends {count} blocks of a prefix of {len(prefix.names)}")
        self.granted, self.num_tokens = True, num_tokens
        self.wanted = {block: place for block, place in self.wanted.items() if block < count}
        self.num_blocks = -(-num_tokens // prefix.block_tokens) - prefix.first
        if self.staging is not None:
            self.staging = self.staging.shortened(self.num_tokens, self.num_blocks)

    def take(self, runs: list[Run]) -> list[range]:
        """Return where announced blocks belong, run by run.

        Raises `ValueError`, and takes nothing, for blocks that are not wanted (any more), or that
        are not contiguous in our memory.
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


def next_to_stage(loads: Iterable[Load], room: int) -> list[tuple[Load, AnyStaging]]:
    """Return the waiting loads that get room now. `room` is in bytes.

    Loads of arrived requests come first, in order. If none of these has room yet, the first may
    have any size. Early loads have half of the room at most, and none while others wait.
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
    """Return how many loads wait for room."""
    return sum(load.waits_for_room for load in loads)


def layout_of(hello: Hello) -> Layout | None:
    """Return how an engine keeps its KV; None if we do not understand its description."""
    return Layout.of(hello.compat, hello.geometry)


def coalesce(wanted: dict[int, int]) -> list[Run]:
    """Join adjacent blocks into runs that are contiguous in the lease and in our memory.

    `wanted` maps blocks of the lease to our blocks.
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


def mismatch(lease: LeaseRef, theirs: Hello, mine: Hello, *, granted: bool) -> str:
    """Return why the answering engine is not the lease's or is incompatible; empty if it fits. A
    lease that may not be granted yet is never that of a former engine."""
    epochs = [theirs.epoch, *(theirs.former or () if granted else ())]
    if theirs.version != mine.version:
        return f"the prefill engine speaks version {theirs.version}, we speak {mine.version}"
    if theirs.engine_id != lease.engine_id or lease.epoch not in epochs:
        return f"the prefill engine {lease.engine_id} was restarted or replaced"
    differing = differences(theirs.compat, mine.compat)
    if layout_of(theirs) is None or layout_of(mine) is None:
        differing += differences(theirs.geometry, mine.geometry)  # nobody could repack that
    return f"the engines cannot exchange KV ({'; '.join(differing)})" if differing else ""


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
