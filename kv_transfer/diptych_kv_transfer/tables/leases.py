"""The prefill engine's side of a hand-off: who may read the blocks of prefills, and until when.

    PROMISED ──grant──▶ GRANTED ◀──▶ READING ──Close(ok)──▶ RELEASED
       │                   │  Open / let go │
       │ Reject, revoke    ├────────────────┴─▶ REVOKED    Reject, revoke, peer lost
       ▼                   │                │
    WITHDRAWN              └────────────────┴─▶ EXPIRED    time

A lease is promised while its prompt is still being computed. It may be opened then, so that
finished blocks travel while others are computed. Its time begins when it is granted, which is when
all its blocks are finished.

The lease of a *prefix* begins in READING: another engine has asked for it, by the names of its
blocks, and this engine has answered which of them it remembers. It is not renewed, so that nobody
can pin a cached prefix for longer than the length of one lease.

A lease ends exactly once, and its blocks are given back (`LeaseEnded`) exactly once: when it has
ended *and* no send of them is in flight. Ending revokes the reader's claim at once: the reader is
told, and its Close is answered `held=False` even while sends are still draining.

A lease may be divided into shares (`shares.py`). Each share is a lease of its own, with the states
above. The lease has ended when all its shares have. The table's caller passes the time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace

from diptych_kv_transfer.tables.actions import Action, Fence, LeaseEnded, Peer, Send, SendBlocks
from diptych_kv_transfer.tables.early_opens import MAX_EARLY_RUNS, EarlyOpens
from diptych_kv_transfer.tables.lease import (
    AT_ONCE,
    LIVE,
    NEVER,
    Claim,
    Lease,
    LeaseState,
    LeftLease,
)
from diptych_kv_transfer.tables.messages import (
    Close,
    Closed,
    FromReader,
    Open,
    Opened,
    Refused,
    Reject,
    Renew,
    Sending,
)
from diptych_kv_transfer.tables.prefix_asks import PrefixAsks
from diptych_kv_transfer.tables.shares import DividedLeases, lease_of, share_named
from diptych_protocol import KVTransferStats

MAX_REMEMBERED = 4096
"""The most ended leases that are remembered: late messages about them are answered rightly."""


@dataclass(slots=True)
class LeaseTable:
    """All leases of one prefill engine."""

    lease_seconds: float
    num_groups: int = 1
    """How many groups of layers have blocks of their own."""
    leases: dict[str, Lease] = field(default_factory=dict)
    """Live leases, and ended ones still being sent; of a divided lease, its shares."""
    counts: Counter[LeaseState] = field(default_factory=Counter)
    """How many leases were promised, granted, first read, and ended in each way."""
    totals: KVTransferStats = field(default_factory=KVTransferStats)
    """What is counted here of the statistics of the hinge."""
    _early: EarlyOpens = field(init=False)
    _asks: PrefixAsks = field(init=False)
    _divided: DividedLeases = field(default_factory=DividedLeases)
    _ended: OrderedDict[str, tuple[LeaseState, Claim | None]] = field(default_factory=OrderedDict)
    """How leases ended, and the claim by which one was released."""

    def __post_init__(self) -> None:
        self._early = EarlyOpens(self.lease_seconds)
        self._asks = PrefixAsks(self.num_groups)

    # --- what the engine says -----------------------------------------------------------------

    def promise(
        self, lease_id: str, request_id: str, num_blocks: int, digest: str, now: float
    ) -> list[Action]:
        """Promise a lease of `num_blocks` blocks. No effect if a lease of this id is in the table.

        The lease does not expire before it is granted.
        """
        if self._of(lease_id):
            return []
        self._ended.pop(lease_id, None)
        self.leases[lease_id] = Lease(lease_id, request_id, digest, num_blocks)
        self.counts[LeaseState.PROMISED] += 1
        opens = self._early.pop_all(lease_id)
        return [action for x in opens for action in self.receive(x.peer, x.message, now)]

    def lend(self, lease_id: str, block_ids: list[int]) -> list[Action]:
        """Record the first blocks of a promised lease that are computed. The list only grows."""
        actions: list[Action] = []
        for lease in self._of(lease_id):
            if lease.state is LeaseState.PROMISED:  # else it was withdrawn meanwhile
                lease.block_ids = block_ids
                actions += self._send_ready(lease)
        return actions

    def grant(self, lease_id: str, block_ids: list[int], now: float) -> list[Action]:
        """Grant a promised lease, all of whose blocks are computed. Its time begins."""
        actions: list[Action] = []
        for lease in self._of(lease_id):
            if lease.state is not LeaseState.PROMISED:
                continue
            lease.block_ids = block_ids
            lease.expires_at = now + self.lease_seconds
            lease.become(LeaseState.GRANTED)
            self.counts[LeaseState.GRANTED] += 1
            if lease.claim is not None:
                lease.become(LeaseState.READING)
            actions += self._send_ready(lease)
        return actions

    def adopt(self, left: LeftLease, now: float) -> None:
        """Go on with a lease that nobody has opened here yet. Its time begins anew."""
        self.promise(left.lease_id, "", len(left.block_ids), left.digest, now)
        self.grant(left.lease_id, left.block_ids, now)

    def lend_prefix(
        self, lease_id: str, block_ids: list[int], last_name: bytes, now: float
    ) -> list[Action]:
        """Answer a reader that asked for a prefix. `block_ids`: the blocks lent to it, if any.

        `last_name` names the last of these blocks, and so all of them. If nobody wants them any
        more, the lease ends at once.
        """
        ask = self._asks.pop(lease_id)
        if not block_ids:
            self.totals.prefixes_refused += 1
            reason = "nothing of the prefix is remembered that the reader lacks"
            return [] if ask is None else self._refuse_prefix(ask.peer, ask.message, reason)
        lease = self.leases[lease_id] = Lease(
            lease_id, "", last_name.hex(), len(block_ids), block_ids, is_prefix=True
        )
        self.counts[LeaseState.PROMISED] += 1
        if ask is None:
            return self._end(lease, LeaseState.WITHDRAWN)
        self.totals.prefixes_lent += 1
        self.counts[LeaseState.GRANTED] += 1
        lease.become(LeaseState.GRANTED)
        lease.become(LeaseState.READING)
        lease.expires_at = now + self.lease_seconds
        lease.claim = Claim(ask.peer, ask.message)
        lease.claim.keep_first(lease.num_blocks)
        return [Send(ask.peer, _opened(lease, lease.claim.tag)), *self._send_ready(lease)]

    def revoke(self, lease_id: str) -> list[Action]:
        """End a lease early. Unknown or ended leases are left alone."""
        return [action for lease in self._of(lease_id) for action in self._revoke(lease)]

    def _revoke(self, lease: Lease) -> list[Action]:
        if lease.state not in LIVE:
            return []
        promised = lease.state is LeaseState.PROMISED
        return self._end(lease, LeaseState.WITHDRAWN if promised else LeaseState.REVOKED)

    def revoke_all(self) -> list[Action]:
        """End every live lease early."""
        return [action for lease_id in list(self.leases) for action in self.revoke(lease_id)]

    # --- what readers say ---------------------------------------------------------------------

    def receive(self, peer: Peer, message: FromReader, now: float) -> list[Action]:
        """Answer a reader's message."""
        named = message.lease_ids if isinstance(message, Renew) else [message.lease_id]
        for lease_id in named:
            self._divide(lease_id)
        match message:
            case Open():
                return self._open(peer, message, now)
            case Close():
                return self._close(peer, message)
            case Renew():
                for lease_id in named:
                    self._renew(lease_id, now)
                return []
            case Reject():
                return self._reject(peer, message)

    def _divide(self, name: str) -> None:
        """Divide a lease because a message names a share of it, unless somebody reads it whole."""
        share = share_named(name)
        lease = None if share is None else self.leases.get(share.lease_id)
        if share is None or lease is None or lease.is_prefix:
            return
        if lease.state not in LIVE or lease.claim is not None or lease.sending:
            return
        del self.leases[lease.lease_id]
        self._divided.divide(share)
        for each in share.all:
            self._ended.pop(each.name, None)
            self.leases[each.name] = replace(lease, lease_id=each.name, part=each.part, sending={})
        self.counts[LeaseState.PROMISED] += share.readers - 1
        if lease.state is LeaseState.GRANTED:
            self.counts[LeaseState.GRANTED] += share.readers - 1

    def _renew(self, lease_id: str, now: float) -> None:
        self._early.renew(lease_id, now)
        for lease in self._of(lease_id):
            if lease.state in LIVE and not lease.is_prefix and lease.expires_at < NEVER:
                lease.expires_at = now + self.lease_seconds

    def _reject(self, peer: Peer, message: Reject) -> list[Action]:
        self._forget_ask(peer, message.lease_id)
        actions: list[Action] = []
        for lease in self._of(message.lease_id):
            if lease.claim is not None and lease.claim.peer != peer:
                continue  # a peer with a copy of the reference must not disturb the reader
            was_live = lease.state in LIVE
            actions += self._revoke(lease)
            self.totals.leases_rejected += was_live
        return actions

    def _open(self, peer: Peer, message: Open, now: float) -> list[Action]:
        lease = self.leases.get(message.lease_id)
        if lease is not None and lease.claim is not None and lease.claim.repeats(peer, message):
            return [Send(peer, _opened(lease, message.tag))]  # repeated
        if lease is None and message.names and message.lease_id not in self._ended:
            return self._ask_for_prefix(peer, message)
        self._early.pop(message.lease_id)
        early = message.early and len(message.runs) <= MAX_EARLY_RUNS
        if lease is None and early and message.lease_id not in self._ended:
            self._early.put(peer, message, now)
            return []
        reason = self._why_not(lease, message)
        if lease is None or reason:
            self.totals.stale_reads_refused += 1
            return [Send(peer, Refused(message.lease_id, reason, message.tag))]
        lease.claim = Claim(peer, message)
        if lease.state is LeaseState.GRANTED:
            lease.become(LeaseState.READING)
            lease.expires_at = now + self.lease_seconds
        return [Send(peer, _opened(lease, message.tag)), *self._send_ready(lease)]

    def _ask_for_prefix(self, peer: Peer, message: Open) -> list[Action]:
        if self._asks.repeats(peer, message):
            return []
        reason = self._asks.why_not(message)
        if reason:
            self.totals.prefixes_refused += 1
            return self._refuse_prefix(peer, message, reason)
        return [self._asks.put(peer, message)]

    def _refuse_prefix(self, peer: Peer, message: Open, reason: str) -> list[Action]:
        if message.lease_id not in self._asks:
            self._remember_end(message.lease_id, LeaseState.WITHDRAWN, None)
        return [Send(peer, Refused(message.lease_id, reason, message.tag))]

    def _forget_ask(self, peer: Peer, lease_id: str) -> None:
        if self._asks.give_up(peer, lease_id):
            self._remember_end(lease_id, LeaseState.WITHDRAWN, None)

    def _why_not(self, lease: Lease | None, message: Open) -> str:
        """Why a lease cannot be opened; empty if it can."""
        if lease is None:
            ended = self._ended.get(message.lease_id)
            return f"the lease has {ended[0].value}" if ended else "unknown lease"
        if lease.state not in LIVE:
            return f"the lease is {lease.state.value}"
        if lease.claim is not None:
            return "the lease is being read"
        if message.digest != lease.digest:
            return "the lease is for another prompt"
        if sum(count for _, count in message.runs) > lease.num_blocks:
            return "more blocks are asked for than the lease has"
        for first, count in message.runs:
            if first + count > lease.num_blocks:
                return f"the lease has no blocks {first}..{first + count - 1}"
        return ""

    def _close(self, peer: Peer, message: Close) -> list[Action]:
        lease_id, tag = message.lease_id, message.tag
        lease = self.leases.get(lease_id)
        self._early.close(peer, lease_id, tag)
        self._forget_ask(peer, lease_id)
        claim = None if lease is None else lease.claim
        if lease is None or claim is None or (claim.peer, claim.tag) != (peer, tag):
            state, by = self._ended.get(lease_id, (None, None))
            held = by is not None and (state, by.peer, by.tag) == (LeaseState.RELEASED, peer, tag)
            return [Send(peer, Closed(lease_id, held, tag))]
        lease.claim = None
        if message.ok and lease.state is LeaseState.READING and not claim.pending:
            closed = Closed(lease_id, held=True, tag=tag)
            return [Send(peer, closed), *self._end(lease, LeaseState.RELEASED, claim)]
        if lease.is_prefix:  # nobody else knows of it
            closed = Closed(lease_id, held=False, tag=tag)
            return [Send(peer, closed), *self._end(lease, LeaseState.REVOKED)]
        # What is on its way may arrive; the lease goes on without a reader.
        if lease.state is LeaseState.READING:
            lease.become(LeaseState.GRANTED)
        return [Send(peer, Closed(lease_id, held=False, tag=tag))]

    # --- what the transport reports -----------------------------------------------------------

    def sends_ended(self, lease_id: str, tag: int) -> list[Action]:
        """Record that the sends from this tag on have ended, whether they succeeded or not."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return []
        lease.sending.pop(tag, None)
        return self._give_back_if_done(lease)

    def peer_lost(self, peer: Peer) -> list[Action]:
        """Handle the loss of a connection, and of every send on it."""
        self._early.peer_lost(peer)
        self._asks.peer_lost(peer)
        actions: list[Action] = []
        for lease in list(self.leases.values()):
            lease.sending = {tag: to for tag, to in lease.sending.items() if to != peer}
            if lease.claim is not None and lease.claim.peer == peer:
                lease.claim = None
                if lease.state is LeaseState.READING:
                    actions += self._end(lease, LeaseState.REVOKED)
                    continue
                # The reader that knows the promise may still open it, from a new connection.
            actions += self._give_back_if_done(lease)
        return actions

    # --- time ---------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """End overdue leases, and cut off readers whose sends are overdue."""
        self._early.tick(now)
        actions: list[Action] = []
        for lease in [x for x in self.leases.values() if x.deadline <= now]:
            if lease.state in LIVE:
                actions += self._end(lease, LeaseState.EXPIRED)
                lease.fence_at = now + self.lease_seconds
            elif lease.fence_at == AT_ONCE:
                lease.fence_at = now + self.lease_seconds
            else:
                lease.fence_at = NEVER
                actions += [Fence(peer) for peer in sorted(set(lease.sending.values()))]
        return actions

    def next_deadline(self) -> float:
        """Return when `tick` has something to do; infinity means never."""
        leases = min((lease.deadline for lease in self.leases.values()), default=NEVER)
        return min(leases, self._early.next_deadline())

    # --- inside -------------------------------------------------------------------------------

    def _send_ready(self, lease: Lease) -> list[Action]:
        """Send the reader what it asked for and is finished by now."""
        claim = lease.claim
        if claim is None:
            return []
        batch = claim.take_ready(lease.block_ids)
        if batch is None:
            return []
        lease.sending[batch.first] = claim.peer
        announcement = Sending(lease.lease_id, claim.tag, batch.first, batch.runs)
        return [
            Send(claim.peer, announcement),
            SendBlocks(claim.peer, lease.lease_id, batch.first, batch.blocks, lease.part),
        ]

    def _end(
        self, lease: Lease, outcome: LeaseState, released_to: Claim | None = None
    ) -> list[Action]:
        """End a lease; a reader that has not read it all is told."""
        lease.become(outcome)
        self.counts[outcome] += 1
        self._remember_end(lease.lease_id, outcome, released_to)
        actions: list[Action] = []
        if lease.claim is not None:
            closed = Closed(lease.lease_id, held=False, tag=lease.claim.tag)
            actions.append(Send(lease.claim.peer, closed))
            lease.claim = None
        return [*actions, *self._give_back_if_done(lease)]

    def _remember_end(self, lease_id: str, outcome: LeaseState, released_to: Claim | None) -> None:
        self._ended[lease_id] = outcome, released_to
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def _give_back_if_done(self, lease: Lease) -> list[Action]:
        if lease.state in LIVE:
            return []
        if lease.sending:
            lease.fence_at = AT_ONCE if lease.fence_at == NEVER else lease.fence_at
            return []
        del self.leases[lease.lease_id]
        ended = self._divided.ended(lease.lease_id, lease.state.value, lease.block_ids)
        if ended is None:
            return []
        return [LeaseEnded(lease.request_id, ended.block_ids, ended.outcome, ended.lease_id)]

    def _of(self, lease_id: str) -> list[Lease]:
        """A lease of the table, or all of its shares that are in the table."""
        names = self._divided.names(lease_id)
        return [self.leases[name] for name in names if name in self.leases]

    # --- what is held -------------------------------------------------------------------------

    @property
    def held(self) -> Counter[LeaseState]:
        """Count the leases in the table by state. Safe to call from another thread."""
        return Counter(lease.state for lease in list(self.leases.values()))

    @property
    def blocks_held(self) -> int:
        """Count the blocks that leases keep pinned. Safe to call from another thread."""
        blocks = {lease_of(x.lease_id): len(x.block_ids) for x in list(self.leases.values())}
        return sum(blocks.values())


def _opened(lease: Lease, tag: int) -> Opened:
    """The answer to a claim that is accepted."""
    return Opened(lease.lease_id, tag, lease.num_blocks if lease.is_prefix else 0)
