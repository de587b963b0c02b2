"""The decode engine's side of a hand-off: it fetches the blocks of a lease into blocks of its own.

    HOLDING ──start──▶ OPENING ──Opened──▶ RECEIVING ──all here──▶ CLOSING ──Closed(held)──▶ done
       │                  │ Refused         │   ▲ Sending   │        │ Closed(not held)       or
       │                  │                 ▼   └───────────┘        │                       KEPT
       │                  ├──cancel, time──▶ STOPPING ──Closed and all receives ended──┐
       └──────────────────┴──────────────────────────────────────────┴────────────────▶ failed

While a request queues, its load is HOLDING: the decode engine (D) connects to the prefill engine
(P) and renews the lease. An *early* load is started for a request that is only announced. At that
time the lease may be only promised, or not even that. A complete early load is KEPT until its
request adopts it or its time is over. Whatever its outcome, an early load does not end the lease,
because another load may still need it.

`LoadEnded` is reported exactly once for every started load (and once more for a KEPT load that no
request adopted), and only when nothing can write to its blocks any more. It says `ok` only after P
confirmed that the lease was held throughout. If D gives up a load, it asks P to stop. The load ends
when P has confirmed this and the receives are over. If P does not answer, D cuts the connection,
which fails all loads on it. The table performs no I/O; its caller passes the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych_kv_transfer.memory.shard import WHOLE, Part
from diptych_kv_transfer.tables.actions import (
    Action,
    Address,
    Connect,
    Fence,
    LoadEnded,
    Peer,
    PrefixLate,
    ReceiveBlocks,
    Send,
    Stage,
    Unpack,
)
from diptych_kv_transfer.tables.load import (
    AT_ONCE,
    NEVER,
    UNDER_WAY,
    LeaseRef,
    Load,
    LoadState,
    Prefix,
    Remote,
    Waits,
    mismatch,
    next_to_stage,
)
from diptych_kv_transfer.tables.messages import (
    Close,
    Closed,
    FromOwner,
    Hello,
    Opened,
    Refused,
    Reject,
    Renew,
    Sending,
)
from diptych_protocol import KVTransferStats

STOP_SECONDS = 5.0
"""How long prefill may take to stop a load that was given up, before the connection is cut."""
ANSWER_SECONDS, READ_SECONDS = 1.0, 5.0
"""How long the owner of a prefix may take to say what it lends, and then to send it. Meanwhile the
request could compute the prefix itself."""
RETURN_SECONDS = 2.0
"""How long a load waits for the return of an engine whose leases outlive it. A core that stands by
needs half a second."""
RETRY_SECONDS = 0.1
RECEIVING_FAILED = "receiving blocks failed"


@dataclass(slots=True)
class LoadTable:
    """All loads of one decode engine."""

    me: Hello
    load_timeout_s: float
    staging_bytes: int = 256 << 20
    """Room for the staged blocks of all loads together. A single load may take more."""
    copied_block_bytes: int = 0
    """Size of one of our blocks, over all ranks, if they are on a device, which no transport
    reaches; then all loads are staged. 0: they are on the host."""
    loads: dict[str, Load] = field(default_factory=dict)
    remotes: dict[Address, Remote] = field(default_factory=dict)
    keepers: set[Address] = field(default_factory=set)
    """Where engines answered last whose leases outlive them."""
    rejects: list[LeaseRef] = field(default_factory=list)
    """Leases to reject as soon as their engine has said Hello."""
    totals: KVTransferStats = field(default_factory=KVTransferStats)
    """What is counted here of the statistics of the hinge. Its loads are those of hand-offs; those
    of prefixes, which may fail without harm, are counted apart."""
    prefixes_started: int = 0
    waits: Waits = field(default_factory=Waits)

    # --- what the engine asks -----------------------------------------------------------------

    def hold(self, request_id: str, lease: LeaseRef, now: float) -> list[Action]:
        """Connect, and keep the lease alive while the request queues."""
        if self._is_free(request_id):
            self.loads[request_id] = Load(request_id, lease, now + lease.renew_every_s)
        return self.reach(lease.address)

    def start(
        self,
        request_id: str,
        lease: LeaseRef,
        digest: str,
        tag: int,
        wanted: dict[int, int],
        num_tokens: int,
        now: float,
        *,
        early: bool = False,
        prefix: Prefix | None = None,
        part: Part = WHOLE,
    ) -> list[Action]:
        """Fetch the wanted blocks.

        `wanted` maps blocks of the lease, counted in our block size, to our blocks; they are the
        last ones of the lease. `num_tokens` is the number of tokens of the lease. The request may
        be held, or new. Raises `RuntimeError` if its load is under way already.

        `prefix`: there is no lease yet; ask for one of these blocks. It may have fewer than wanted.
        `part`: fill only this part of each of our blocks.
        """
        if not self._is_free(request_id):
            raise RuntimeError(f"the load of request {request_id} was started before")
        load = Load(request_id, lease, now + lease.renew_every_s, LoadState.OPENING, early=early)
        load.patience_s = self._patience(ANSWER_SECONDS if prefix is not None else NEVER)
        load.deadline, load.waiting_since, load.prefix = now + load.patience_s, now, prefix
        load.digest, load.tag, load.num_tokens, load.part = digest, tag, num_tokens, part
        load.at_first, load.wanted, load.num_blocks = wanted, dict(wanted), len(wanted)
        self.loads[request_id] = load
        self.totals.loads_started += prefix is None
        self.prefixes_started += prefix is not None
        return [*self.reach(lease.address), *self._open(load, now)]

    def adopt(self, request_id: str, now: float) -> list[Action]:
        """Make an early load an ordinary one, because its request has arrived."""
        load = self.loads.get(request_id)
        if load is None or not load.early:
            return []
        load.early, load.waiting_since = False, now
        if load.state is LoadState.KEPT:
            self.waits.saw(load, 0.0)
            del self.loads[request_id]
            return []
        if load.state is LoadState.STOPPING:
            return []
        load.deadline = now + self.load_timeout_s
        return self._open(load, now) if load.state is LoadState.OPENING else []

    def cancel(self, request_id: str, now: float) -> list[Action]:
        """Give up a load, and tell the prefill engine as soon as possible."""
        load = self.loads.get(request_id)
        if load is None:
            return []
        load.problem, load.back_by = load.problem or "cancelled", AT_ONCE
        if load.state is LoadState.KEPT:
            del self.loads[request_id]
            return []
        if load.asked:
            return self._stop(load, now)
        return [*self._end(load, now), *self._let_go(load)]

    def reject(self, lease: LeaseRef) -> list[Action]:
        """Tell the prefill engine that a lease is not needed."""
        self.rejects.append(lease)
        return [*self.reach(lease.address), *self._send_rejects(lease.address)]

    def reach(self, address: Address) -> list[Action]:
        """Connect to an engine, unless a connection exists or is being made."""
        if address in self.remotes:
            return []
        self.remotes[address] = Remote()
        return [Connect(address)]

    # --- what the transport reports -----------------------------------------------------------

    def connected(self, address: Address, peer: Peer, now: float) -> list[Action]:
        self.remotes[address] = Remote(peer, greet_by=now + self.load_timeout_s)
        return [Send(peer, self.me)]

    def connect_failed(self, address: Address, reason: str, now: float) -> list[Action]:
        self.remotes.pop(address, None)
        where = f"{address[0]}:{address[1]}"
        return self._lost(address, f"cannot connect to {where}: {reason}", now)

    def peer_lost(self, peer: Peer, now: float) -> list[Action]:
        """Fail the loads of a lost connection, which no longer writes to our blocks."""
        for address, remote in list(self.remotes.items()):
            if remote.peer == peer:
                del self.remotes[address]
                return self._lost(address, "the connection to the prefill engine was lost", now)
        return []

    def greeted(self, peer: Peer, hello: Hello, now: float) -> list[Action]:
        """Handle the Hello of a peer."""
        for address, remote in self.remotes.items():
            if remote.peer == peer and remote.hello is None:
                remote.hello, remote.greet_by = hello, NEVER
                if hello.former is None:
                    self.keepers.discard(address)
                else:
                    self.keepers.add(address)
                waiting = [x for x in self._at(address) if x.state is LoadState.OPENING]
                opens = [action for load in waiting for action in self._open(load, now)]
                return [*self._send_rejects(address), *opens]
        return []

    def receive(self, peer: Peer, message: FromOwner, now: float) -> list[Action]:
        load = self._find(peer, message)
        if load is None:
            return []  # late or repeated
        match message:
            case Opened() if load.state is LoadState.OPENING or load.may_shorten:
                load.state = LoadState.RECEIVING
                shortened = self._shorten(load, message, now)
                return [*shortened, *self._go_on(load, peer, now)]
            case Sending() if load.state is not LoadState.CLOSING:
                return self._receive_batch(load, peer, message, now)
            case Refused() if load.state in (LoadState.OPENING, LoadState.STOPPING):
                load.problem = load.problem or message.reason
            case Closed(held=True) if load.state is LoadState.CLOSING:
                pass
            case Closed(held=False):
                load.problem = load.problem or "the lease ended while its blocks were read"
            case _:
                return []
        load.over = True
        return self._go_on(load, peer, now)

    def receives_ended(self, request_id: str, tag: int, *, ok: bool, now: float) -> list[Action]:
        """Record that the receives from this tag on have ended. `ok` is False if some failed."""
        load = self.loads.get(request_id)
        if load is None or tag not in load.receiving:
            return []
        load.receiving.remove(tag)
        if not load.receiving:
            load.moving_seconds += now - load.moving_since
        if not ok:
            load.problem = load.problem or RECEIVING_FAILED
        peer = self.remotes.get(load.lease.address, Remote()).peer
        return [] if peer is None else self._go_on(load, peer, now)

    # --- time ---------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Renew the leases of all loads, and give up overdue loads."""
        actions: list[Action] = []
        for load in list(self.loads.values()):
            if load.deadline == AT_ONCE:
                load.deadline = now + self.load_timeout_s
            elif load.deadline <= now:
                actions += self._overdue(load, now)
            elif load.renew_at <= now:
                load.renew_at = now + load.lease.renew_every_s
                actions += self._renew(load)
        return [*actions, *(cut for remote in self.remotes.values() for cut in remote.tick(now))]

    def next_deadline(self) -> float:
        """Return when `tick` has something to do; infinity means never."""
        loads = min((min(x.deadline, x.renew_at) for x in self.loads.values()), default=NEVER)
        return min(loads, min((x.greet_by for x in self.remotes.values()), default=NEVER))

    def _renew(self, load: Load) -> list[Action]:
        remote = self.remotes.get(load.lease.address, Remote())
        if remote.peer is None or remote.hello is None:
            return self.reach(load.lease.address)
        return [Send(remote.peer, Renew([load.lease.lease_id]))]

    def _overdue(self, load: Load, now: float) -> list[Action]:
        if load.state is LoadState.KEPT:
            del self.loads[load.request_id]
            return [LoadEnded(load.request_id, False, "nobody came for it")]
        load.problem = load.problem or f"no hand-off within {load.patience_s:g} s"
        remote = self.remotes.get(load.lease.address, Remote())
        unasked = load.waits_for_room or (load.prefix is not None and not load.asked)
        if remote.peer is None or unasked:
            return [*self._end(load, now), *self._let_go(load)]
        if load.asked and not load.last_chance:
            late = [] if load.prefix is None else [PrefixLate(load.request_id)]
            return [*late, *self._stop(load, now)]
        # A peer that is slow now may still write later: cut it off first.
        load.deadline = remote.greet_by = NEVER
        return [Fence(remote.peer)]

    @property
    def in_flight(self) -> int:
        """The number of hand-offs whose loads have started and not ended. Safe to read from another
        thread."""
        loads = list(self.loads.values())
        return sum(load.state in UNDER_WAY and load.prefix is None for load in loads)

    @property
    def prefixes_in_flight(self) -> int:
        """The number of prefixes whose loads have started and not ended. Safe to read from another
        thread."""
        return sum(load.prefix is not None for load in list(self.loads.values()))

    # --- inside -------------------------------------------------------------------------------

    def _is_free(self, request_id: str) -> bool:
        """Whether a load may begin for this request: no earlier load of it is under way."""
        load = self.loads.get(request_id)
        return load is None or load.state not in UNDER_WAY

    def _open(self, load: Load, now: float) -> list[Action]:
        """Ask for the blocks, once the peer's Hello shows that it is the right engine."""
        remote = self.remotes[load.lease.address]
        if remote.peer is None or remote.hello is None:
            return []
        load.problem = mismatch(load.lease, remote.hello, self.me, granted=not load.early)
        if load.prefix is not None:
            load.problem = load.problem or load.prefix.misfit(remote.hello)
        if not load.problem:
            if not load.asked:
                load.fit_to(remote.hello, self.me, self.copied_block_bytes)
            if AT_ONCE < load.back_by < NEVER:
                load.deadline, load.back_by = now + load.patience_s, AT_ONCE
            if load.waits_for_room:
                actions = self._open_staged()
                if load.waits_for_room and not load.early and load.prefix is None:
                    load.deadline = NEVER  # those that have the room have deadlines
                return actions
            return [Send(remote.peer, load.ask())]
        return [*self._let_go(load), *self._end(load, now)]

    def _open_staged(self) -> list[Action]:
        """Open loads that need staging, as long as there is room."""
        actions: list[Action] = []
        for load, staging in next_to_stage(self.loads.values(), self.staging_bytes):
            peer = self.remotes.get(load.lease.address, Remote()).peer
            if peer is not None:
                actions += [Stage(load.request_id, staging), Send(peer, load.ask())]
        return actions

    def _receive_batch(self, load: Load, peer: Peer, message: Sending, now: float) -> list[Action]:
        """Post receives for an announced batch, given up or not, so that P's sends end."""
        if message.first in load.batches:
            return []  # repeated
        if load.state is LoadState.OPENING:
            load.state = LoadState.RECEIVING
        try:
            places = load.take(message.runs)
        except ValueError as exc:
            load.problem = load.problem or f"the prefill engine broke the protocol: {exc}"
            return self._go_on(load, peer, now)
        load.batches.add(message.first)
        if not load.receiving:
            load.moving_since = now
        load.receiving.add(message.first)
        receive = ReceiveBlocks(
            peer, load.request_id, message.first, places, load.staged, load.part
        )
        return [receive]

    def _shorten(self, load: Load, message: Opened, now: float) -> list[Action]:
        """Do not wait for what P does not lend of a prefix."""
        prefix = load.prefix
        if prefix is None:
            return []
        try:
            load.shorten(prefix, message)
        except ValueError as exc:
            load.problem = load.problem or f"the prefill engine broke the protocol: {exc}"
            return []
        load.patience_s = self._patience(READ_SECONDS)
        load.deadline = now + load.patience_s
        return [] if load.staging is None else [Stage(load.request_id, load.staging)]

    def _patience(self, seconds: float) -> float:
        return min(seconds, self.load_timeout_s)

    def _go_on(self, load: Load, peer: Peer, now: float) -> list[Action]:
        """Close, stop or end a load after a change of its state."""
        if load.over:
            return [] if load.receiving else self._end(load, now)
        if load.state is not LoadState.RECEIVING:
            return []
        if load.problem:
            return self._stop(load, now)
        if load.wanted or load.receiving:
            return []
        load.state = LoadState.CLOSING
        return [Send(peer, Close(load.lease.lease_id, True, load.tag))]

    def _stop(self, load: Load, now: float) -> list[Action]:
        """Ask P to stop. The load waits for the answer and its receives, up to a deadline."""
        if load.last_chance:
            return []
        load.last_chance = True
        load.deadline, load.renew_at = now + min(STOP_SECONDS, self.load_timeout_s), NEVER
        if load.state is LoadState.CLOSING:
            return []  # its answer is on its way
        load.state = LoadState.STOPPING
        peer = self.remotes.get(load.lease.address, Remote()).peer
        if peer is None:
            return []
        close = Send(peer, Close(load.lease.lease_id, False, load.tag))
        return [close, *self._let_go(load)]

    def _let_go(self, load: Load) -> list[Action]:
        """Reject the lease, unless the load is early, because another load may need that lease, or
        unless there is no lease, because none was asked for."""
        unknown = load.prefix is not None and not load.asked
        return [] if load.early or unknown else self.reject(load.lease)

    def _send_rejects(self, address: Address) -> list[Action]:
        peer = self.remotes[address].peer
        if peer is None or self.remotes[address].hello is None:
            return []
        mine = [x for x in self.rejects if x.address == address]
        self.rejects = [x for x in self.rejects if x.address != address]
        self.totals.leases_refused_here += len(mine)
        return [Send(peer, Reject(x.lease_id)) for x in mine]

    def _at(self, address: Address) -> list[Load]:
        return [load for load in self.loads.values() if load.lease.address == address]

    def _find(self, peer: Peer, message: FromOwner) -> Load | None:
        """Return the load whose claim a message names; None for an earlier claim."""
        for load in self.loads.values():
            if (load.lease.lease_id, load.tag) == (message.lease_id, message.tag):
                remote = self.remotes.get(load.lease.address)
                if remote is not None and remote.peer == peer and load.state in UNDER_WAY:
                    return load
        return None

    def _lost(self, address: Address, reason: str, now: float) -> list[Action]:
        """End the loads from an engine, or have them wait for its return if its leases outlive
        it."""
        self.rejects = [x for x in self.rejects if x.address != address]
        actions: list[Action] = []
        for load in [x for x in self._at(address) if x.state in UNDER_WAY]:
            if address in self.keepers and self._may_wait(load, now):
                staged = load.staged
                load.begin_again()
                actions += self._open_staged() if staged else []
                load.deadline = load.back_by = min(load.back_by, now + RETURN_SECONDS)
                load.renew_at = now + RETRY_SECONDS
                continue
            load.problem = load.problem or reason
            actions += self._end(load, now)
        return actions

    def _may_wait(self, load: Load, now: float) -> bool:
        granted = not load.early and load.prefix is None
        return granted and now < load.back_by and load.problem in ("", RECEIVING_FAILED)

    def _end(self, load: Load, now: float) -> list[Action]:
        """End a load, because nothing touches its blocks any more."""
        held = load.state is LoadState.HOLDING
        ok = not load.problem
        if ok and load.early:
            load.state, load.renew_at = LoadState.KEPT, NEVER
        else:
            del self.loads[load.request_id]
        if held:
            return []
        self.totals.loads_completed += ok and load.prefix is None
        self.totals.loads_failed += not ok and load.prefix is None
        others = self._open_staged() if load.staged else []
        if not ok:
            return [LoadEnded(load.request_id, False, load.problem), *others]
        seconds = now - load.waiting_since
        if not load.early:
            self.waits.saw(load, seconds)
        num_tokens = 0 if load.prefix is None else load.num_tokens
        if load.prefix is not None and load.prefix.whole is not None:
            num_tokens = load.prefix.num_tokens
        ended = LoadEnded(load.request_id, True, "", load.num_blocks, seconds, num_tokens)
        return [Unpack(load.request_id), ended, *others] if load.staged else [ended]
