"""D's side of the hinge: fetching the blocks of a lease into blocks of our own.

    HOLDING ──start──▶ OPENING ──Opened──▶ RECEIVING ──all here──▶ CLOSING ──Closed(held)──▶ done
       │                  │ Refused             │ cut off             │ Closed(not held)
       └──────────────────┴────────────────────┴─────────────────────┴──▶ failed

While a request queues its load is HOLDING: the peer is connected, and the lease is renewed from
then on. `LoadEnded` is reported exactly once for every started load, and only when nothing can
write to its blocks any more: all receives have ended, or the connection was fenced. It says `ok`
only after P confirmed that the lease was held throughout. Pure: time is passed in.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from diptych_kv_transfer.actions import (
    Action,
    Address,
    Connect,
    Fence,
    LoadEnded,
    Peer,
    ReceiveBlocks,
    Send,
)
from diptych_kv_transfer.messages import (
    Close,
    Closed,
    FromOwner,
    Hello,
    Open,
    Opened,
    Refused,
    Reject,
    Renew,
    Run,
)

MIN_LEASE_S, MAX_LEASE_S = 0.1, 3600.0
"""Leases outside are renewed as often as the shortest; their length comes from outside."""


class LoadState(enum.Enum):
    HOLDING = "holding"
    OPENING = "opening"
    RECEIVING = "receiving"
    CLOSING = "closing"


@dataclass(frozen=True, slots=True)
class LeaseRef:
    """Where a lease is, as `kv_transfer_params` name it."""

    lease_id: str
    address: Address
    engine_id: str
    epoch: str


@dataclass(slots=True)
class Load:
    """One request's hand-off."""

    request_id: str
    lease: LeaseRef
    renew_every_s: float
    renew_at: float
    state: LoadState = LoadState.HOLDING
    deadline: float = float("inf")
    digest: str = ""
    tag: int = 0
    runs: list[Run] = field(default_factory=list)
    local_runs: list[range] = field(default_factory=list)
    started: bool = False
    """Somebody waits for its LoadEnded."""
    started_at: float = 0.0
    cancelled: bool = False
    problem: str = ""
    """Why it cannot succeed any more."""


@dataclass(slots=True)
class Remote:
    """The engine at an address, as far as we are in touch with it."""

    peer: Peer | None = None
    hello: Hello | None = None


@dataclass(slots=True)
class LoadTable:
    """All loads of one decode engine."""

    me: Hello
    load_timeout_s: float
    loads: dict[str, Load] = field(default_factory=dict)
    remotes: dict[Address, Remote] = field(default_factory=dict)
    rejects: list[LeaseRef] = field(default_factory=list)
    """Leases to reject as soon as their engine is in touch."""
    completed: int = 0
    failed: int = 0

    # --- what the engine asks -----------------------------------------------------------------

    def hold(
        self, request_id: str, lease: LeaseRef, lease_seconds: float, now: float
    ) -> list[Action]:
        """Connect, and keep the lease alive while the request queues."""
        every = lease_seconds / 3 if MIN_LEASE_S <= lease_seconds <= MAX_LEASE_S else MIN_LEASE_S
        self.loads[request_id] = Load(request_id, lease, every, now + every)
        return self.reach(lease.address)

    def start(
        self,
        request_id: str,
        digest: str,
        tag: int,
        runs: list[Run],
        local_runs: list[range],
        now: float,
    ) -> list[Action]:
        """Fetch `runs` of the lease into `local_runs`, pairwise. The request must be held."""
        load = self.loads[request_id]
        load.started, load.started_at = True, now
        load.deadline = now + self.load_timeout_s
        load.digest, load.tag, load.runs, load.local_runs = digest, tag, runs, local_runs
        load.state = LoadState.OPENING
        return [*self.reach(load.lease.address), *self._advance(load.lease.address, now)]

    def cancel(self, request_id: str) -> list[Action]:
        """Nobody wants the blocks any more; P is told so as soon as it can be."""
        load = self.loads.get(request_id)
        if load is None or load.cancelled:
            return []
        load.cancelled, load.problem = True, "cancelled"
        remote = self.remotes.get(load.lease.address, Remote())
        if load.state is LoadState.HOLDING or remote.hello is None:
            return [*self._end(load), *self.reject(load.lease)]
        return []  # under way: its receives must end before its blocks are free

    def reject(self, lease: LeaseRef) -> list[Action]:
        """Tell P that a lease is not needed."""
        self.rejects.append(lease)
        return [*self.reach(lease.address), *self._send_rejects(lease.address)]

    # --- what the transport reports -----------------------------------------------------------

    def connected(self, address: Address, peer: Peer) -> list[Action]:
        self.remotes.setdefault(address, Remote()).peer = peer
        return [Send(peer, self.me)]

    def connect_failed(self, address: Address, reason: str) -> list[Action]:
        self.remotes.pop(address, None)
        return self._fail_all(address, f"cannot connect to {address[0]}:{address[1]}: {reason}")

    def peer_lost(self, peer: Peer) -> list[Action]:
        """A connection is gone; nothing writes to our blocks on its behalf any more."""
        for address, remote in list(self.remotes.items()):
            if remote.peer == peer:
                del self.remotes[address]
                return self._fail_all(address, "the connection to the prefill engine was lost")
        return []

    def greeted(self, peer: Peer, hello: Hello, now: float) -> list[Action]:
        """The engine at the other end says who it is."""
        for address, remote in self.remotes.items():
            if remote.peer == peer:
                remote.hello = hello
                return [*self._send_rejects(address), *self._advance(address, now)]
        return []

    def receive(self, peer: Peer, message: FromOwner, now: float) -> list[Action]:
        load = self._find(peer, message.lease_id)
        if load is None:
            return []
        match message:
            case Opened() if load.state is LoadState.OPENING:
                load.state = LoadState.RECEIVING
                if load.local_runs:
                    return [ReceiveBlocks(peer, load.request_id, load.tag, load.local_runs)]
                return self._close(load, peer)
            case Refused() if load.state is LoadState.OPENING:
                load.problem = load.problem or message.reason
                return self._end(load, now)
            case Closed() if load.state is LoadState.CLOSING:
                if not message.held:
                    load.problem = load.problem or "the lease ended while its blocks were read"
                return self._end(load, now)
            case _:
                return []  # late or repeated

    def receives_ended(self, request_id: str, *, ok: bool) -> list[Action]:
        """All receives of a load have ended; False: some were cut off."""
        load = self.loads.get(request_id)
        if load is None or load.state is not LoadState.RECEIVING:
            return []
        remote = self.remotes.get(load.lease.address, Remote())
        if not ok:
            load.problem = load.problem or "receiving blocks failed"
        if remote.peer is None:
            return self._end(load)
        return self._close(load, remote.peer)

    # --- time ---------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Renew the leases of all loads; give up what is overdue."""
        actions: list[Action] = []
        for load in list(self.loads.values()):
            remote = self.remotes.get(load.lease.address, Remote())
            if load.deadline <= now:
                load.problem = load.problem or f"no hand-off within {self.load_timeout_s:g} s"
                load.deadline = float("inf")
                # A peer that is slow now may still write later: cut it off first.
                actions += self._end(load) if remote.peer is None else [Fence(remote.peer)]
            elif load.renew_at <= now:
                load.renew_at = now + load.renew_every_s
                if remote.peer is not None and remote.hello is not None:
                    actions.append(Send(remote.peer, Renew([load.lease.lease_id])))
        return actions

    def next_deadline(self) -> float:
        """When `tick` has something to do; infinity: never."""
        return min(
            (
                x.renew_at if x.state is LoadState.HOLDING else x.deadline
                for x in self.loads.values()
            ),
            default=float("inf"),
        )

    # --- inside -------------------------------------------------------------------------------

    def reach(self, address: Address) -> list[Action]:
        """Be or get in touch with an engine."""
        if address in self.remotes:
            return []
        self.remotes[address] = Remote()
        return [Connect(address)]

    def _advance(self, address: Address, now: float) -> list[Action]:
        """Open what waits for this engine, or learn that it is not the one that was meant."""
        remote = self.remotes[address]
        if remote.peer is None or remote.hello is None:
            return []
        actions: list[Action] = []
        for load in [x for x in self.loads.values() if x.lease.address == address]:
            if load.state is not LoadState.OPENING or not load.started:
                continue
            problem = mismatch(load.lease, remote.hello, self.me)
            if problem:
                load.problem = problem
                actions += [Send(remote.peer, Reject(load.lease.lease_id)), *self._end(load, now)]
            else:
                claim = Open(load.lease.lease_id, load.digest, load.tag, load.runs)
                actions.append(Send(remote.peer, claim))
        return actions

    def _close(self, load: Load, peer: Peer) -> list[Action]:
        load.state = LoadState.CLOSING
        return [Send(peer, Close(load.lease.lease_id, ok=not load.problem))]

    def _send_rejects(self, address: Address) -> list[Action]:
        remote = self.remotes[address]
        if remote.peer is None or remote.hello is None:
            return []
        mine = [x for x in self.rejects if x.address == address]
        self.rejects = [x for x in self.rejects if x.address != address]
        return [Send(remote.peer, Reject(x.lease_id)) for x in mine]

    def _find(self, peer: Peer, lease_id: str) -> Load | None:
        for load in self.loads.values():
            if load.lease.lease_id == lease_id:
                remote = self.remotes.get(load.lease.address)
                if remote is not None and remote.peer == peer:
                    return load
        return None

    def _fail_all(self, address: Address, reason: str) -> list[Action]:
        self.rejects = [x for x in self.rejects if x.address != address]
        actions: list[Action] = []
        for load in [x for x in self.loads.values() if x.lease.address == address]:
            load.problem = load.problem or reason
            if load.started:
                actions += self._end(load)
        return actions

    def _end(self, load: Load, now: float = 0.0) -> list[Action]:
        del self.loads[load.request_id]
        if not load.started:
            return []
        ok = not load.problem
        self.completed += ok
        self.failed += not ok
        blocks = sum(count for _, count in load.runs) if ok else 0
        seconds = now - load.started_at if ok else 0.0
        return [LoadEnded(load.request_id, ok, load.problem, blocks, seconds)]


def mismatch(lease: LeaseRef, theirs: Hello, mine: Hello) -> str:
    """Why the engine that answers is not the one the lease is from, or does not fit ours."""
    if theirs.version != mine.version:
        return f"the prefill engine speaks version {theirs.version}, we speak {mine.version}"
    if (theirs.engine_id, theirs.epoch) != (lease.engine_id, lease.epoch):
        return f"the prefill engine {lease.engine_id} was restarted or replaced"
    differing = [
        f"{name}: {theirs.compat.get(name)!r} there, {mine.compat.get(name)!r} here"
        for name in sorted(theirs.compat.keys() | mine.compat.keys())
        if theirs.compat.get(name) != mine.compat.get(name)
    ]
    return f"the engines cannot exchange KV ({'; '.join(differing)})" if differing else ""


def coalesce(
    indices: list[int], remote_block_ids: list[int], local_block_ids: list[int]
) -> tuple[list[Run], list[range]]:
    """Join neighbours into runs that are contiguous in P's memory and in ours.

    Block `indices[i]` of the lease goes to `local_block_ids[i]`.
    """
    runs: list[Run] = []
    local_runs: list[range] = []
    for index, local in zip(indices, local_block_ids, strict=True):
        if runs:
            first, count = runs[-1]
            last = remote_block_ids[first + count - 1]
            joined = index == first + count and remote_block_ids[index] == last + 1
            if joined and local == local_runs[-1].stop:
                runs[-1] = (first, count + 1)
                local_runs[-1] = range(local_runs[-1].start, local + 1)
                continue
        runs.append((index, 1))
        local_runs.append(range(local, local + 1))
    return runs, local_runs
