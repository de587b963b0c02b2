"""Connections between hinges: control messages, and blocks that travel piece by piece.

A connection is reliable and in order, as UCX's are, so that a message that is lost means that the
connection is. Beyond that, messages may be made to vanish, to come twice or out of order, which the
protocol must bear. A run of blocks moves in pieces at different times, straight from one memory
into the other, so that a block that is reused meanwhile really is torn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from sim_clock import Clock
from sim_model import BLOCK, Memory

from diptych_kv_transfer.tables.actions import (
    Address,
    Connected,
    ConnectFailed,
    Event,
    Peer,
    PeerLost,
    Received,
    TransferEnded,
)

DELAY_S = 0.01
"""Typical time of a message."""
KEEPALIVE_S = 1.0
"""After about this long a partition breaks connections."""
LATE_S = 1.0
"""How late messages may be, at most."""


class Host(Protocol):
    """A process on the network."""

    address: Address
    memory: Memory

    @property
    def alive(self) -> bool:
        """It has not crashed."""

    @property
    def compat(self) -> dict[str, int | str]:
        """What KV it understands."""

    def report(self, event: Event) -> None:
        """Something happened on its connections. If it is stalled, it will learn of it later."""

    def may_touch(self, blocks: range) -> None:
        """A peer is about to touch these blocks. Raises `AssertionError` if that is too late."""


@dataclass(slots=True)
class Faults:
    """How badly the network behaves: probabilities for each message, transfer or connect."""

    lose: float = 0.0
    drop: float = 0.0
    late: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    fail_transfer: float = 0.0
    fail_connect: float = 0.0
    hang_connect: float = 0.0


@dataclass(slots=True)
class Transfer:
    """One side of the blocks that travel under one key."""

    key: Hashable
    runs: list[range]
    tag: int
    left: set[int]
    """Tags of the runs that are not complete."""
    ok: bool = True


@dataclass(slots=True, eq=False)
class End:
    """One end of a connection."""

    host: Host
    peer: Peer
    """What the host calls this connection."""
    open: bool = True
    last_arrival: float = 0.0
    connecting_to: Address | None = None
    """Until the host knows of the connection that it wanted."""
    other: End = field(init=False)
    transfers: dict[Hashable, Transfer] = field(default_factory=dict)
    sends: dict[int, tuple[Transfer, range]] = field(default_factory=dict)
    """By tag: runs that wait for the other end's receive."""
    receives: dict[int, tuple[Transfer, range]] = field(default_factory=dict)


class Network:
    """All connections of a world, and who can reach whom."""

    def __init__(self, clock: Clock, random: Random, note: Callable[[str], None]) -> None:
        """`note` is told which faults happened."""
        self.clock = clock
        self.random = random
        self.faults = Faults()
        self.hosts: dict[Address, Host] = {}
        """Who answers at an address now."""
        self.machines: dict[str, str] = {}
        """Names by IP address."""
        self.cut_off: set[frozenset[str]] = set()
        """Pairs of host names that cannot reach each other."""
        self.note = note
        self._ends: dict[Peer, End] = {}
        self._parked: list[tuple[frozenset[str], Callable[[], None]]] = []
        """What waits for a partition to heal."""
        self._next_peer = 0

    # --- who reaches whom ---------------------------------------------------------------------

    def machine(self, address: Address) -> str:
        """The name of whoever has an address; the address itself for who has none."""
        return self.machines.get(address[0], address[0])

    def reaches(self, one: str, other: str) -> bool:
        """Whether packets pass between two hosts."""
        return frozenset((one, other)) not in self.cut_off

    def partition(self, one: str, other: str) -> None:
        """Let no packet pass between two hosts; their connections break after a while."""
        self.cut_off.add(frozenset((one, other)))
        for end in list(self._ends.values()):
            pair = frozenset((self.machine(end.host.address), self.machine(end.other.host.address)))
            if pair == frozenset((one, other)):
                self.clock.after(KEEPALIVE_S * (0.5 + self.random.random()), self._give_up, end)

    def heal(self, one: str, other: str) -> None:
        """Packets pass again; those that waited come now, if their connections still exist."""
        pair = frozenset((one, other))
        self.cut_off.discard(pair)
        now = [resume for parked, resume in self._parked if parked == pair]
        self._parked = [entry for entry in self._parked if entry[0] != pair]
        for resume in now:
            resume()

    def _give_up(self, end: End) -> None:
        if not self.reaches(self.machine(end.host.address), self.machine(end.other.host.address)):
            self.bury(end)

    def _passes(self, end: End, call: Callable[[], None]) -> bool:
        """Whether packets between an end and the other pass; if not, the call waits for that."""
        one, other = self.machine(end.host.address), self.machine(end.other.host.address)
        if self.reaches(one, other):
            return True
        self._parked.append((frozenset((one, other)), call))
        return False

    # --- connections --------------------------------------------------------------------------

    def connect(self, host: Host, address: Address) -> None:
        """Ends in `Connected` or `ConnectFailed`, or hangs until the keep-alive finds out."""
        chance = self.random.random()
        delay = self._delay()
        target = self.hosts.get(address)
        if target is None or not target.alive or chance < self.faults.fail_connect:
            self.note("connect failed")
            self.clock.after(delay, host.report, ConnectFailed(address, "refused"))
            return
        chance -= self.faults.fail_connect
        apart = not self.reaches(self.machine(host.address), self.machine(address))
        hangs = apart or chance < self.faults.hang_connect
        mine, theirs = self._end(host), self._end(target)
        mine.other, theirs.other = theirs, mine
        mine.connecting_to = address
        self.clock.after(delay, self._connected, mine, address)
        mine.last_arrival = self.clock.now + delay
        if hangs:
            self.note("connect hangs")
            theirs.open = False
            del self._ends[theirs.peer]
            self.clock.after(KEEPALIVE_S * (1 + self.random.random()), self.bury, mine)
            return
        theirs.last_arrival = self.clock.now + self._delay()
        self.clock.at(theirs.last_arrival, self._arrive, theirs, Connected(theirs.peer, None))

    def _connected(self, end: End, address: Address) -> None:
        if end.open:
            end.connecting_to = None
            end.host.report(Connected(end.peer, address))

    def _end(self, host: Host) -> End:
        end = End(host, self._next_peer)
        self._next_peer += 1
        self._ends[end.peer] = end
        return end

    def fence(self, peer: Peer) -> None:
        """Cut a connection. For a moment its transfers may still touch memory."""
        end = self._ends.get(peer)
        if end is not None:
            self.clock.after(self.random.random() * 0.001, self.bury, end)

    def bury(self, end: End) -> None:
        """One end is gone; the other learns of it as soon as packets pass."""
        if not end.open:
            return
        end.open = False
        ended, end.transfers = end.transfers, {}
        end.sends.clear()
        end.receives.clear()
        del self._ends[end.peer]
        if end.host.alive:
            for key in ended:
                end.host.report(TransferEnded(key, ok=False))
            if end.connecting_to is not None:
                end.host.report(ConnectFailed(end.connecting_to, "lost"))
            else:
                end.host.report(PeerLost(end.peer))
        self.clock.after(self._delay(), self._tell_lost, end.other)

    def _tell_lost(self, end: End) -> None:
        if end.open and self._passes(end, lambda: self._tell_lost(end)):
            self.bury(end)

    def cut_any(self) -> bool:
        """Break some connection; False if there is none."""
        if self._ends:
            self.bury(self.random.choice(list(self._ends.values())))
            return True
        return False

    def crash(self, host: Host) -> None:
        """A process is gone, and all its connections with it."""
        for end in [e for e in self._ends.values() if e.host is host]:
            self.bury(end)

    # --- messages -----------------------------------------------------------------------------

    def _delay(self) -> float:
        return DELAY_S * (0.2 + self.random.random())

    def send(self, peer: Peer, data: bytes) -> None:
        """A control message; one to a lost peer is dropped."""
        end = self._ends.get(peer)
        if end is None:
            return
        faults, chance = self.faults, self.random.random()
        if chance < faults.lose:
            self.note("message lost with its connection")
            self.bury(end)
            return
        chance -= faults.lose
        if chance < faults.drop:
            self.note("message dropped")
            return
        chance -= faults.drop
        other = end.other
        arrival = self.clock.now + self._delay()
        if chance < faults.reorder:
            self.note("message overtaken")
            arrival += self._delay() * 3
        else:
            if chance - faults.reorder < faults.late:
                self.note("message late")
                arrival += LATE_S * self.random.random()
            arrival = other.last_arrival = max(arrival, other.last_arrival)
        event = Received(other.peer, data)
        self.clock.at(arrival, self._arrive, other, event)
        if self.random.random() < faults.duplicate:
            self.note("message duplicated")
            self.clock.at(arrival + self._delay() * 3, self._arrive, other, event)

    def _arrive(self, end: End, event: Event) -> None:
        if end.open and self._passes(end, lambda: self._arrive(end, event)):
            end.host.report(event)

    # --- blocks -------------------------------------------------------------------------------

    def send_blocks(self, peer: Peer, key: Hashable, tag: int, runs: list[range]) -> None:
        """Ends in `TransferEnded`, once for all runs."""
        self._post(peer, key, tag, runs, sending=True)

    def receive_blocks(self, peer: Peer, key: Hashable, tag: int, runs: list[range]) -> None:
        """Ends in `TransferEnded`, once for all runs."""
        self._post(peer, key, tag, runs, sending=False)

    def _post(
        self, peer: Peer, key: Hashable, tag: int, runs: list[range], *, sending: bool
    ) -> None:
        end = self._ends.get(peer)
        if end is None:
            return  # cannot happen: a peer is forgotten with its PeerLost
        if self.random.random() < self.faults.fail_transfer:
            self.note(f"{'send' if sending else 'receive'} could not be posted")
            self.clock.after(0.0, end.host.report, TransferEnded(key, ok=False))
            return
        transfer = Transfer(key, runs, tag, set(range(tag, tag + len(runs))))
        end.transfers[key] = transfer
        mine = end.sends if sending else end.receives
        theirs = end.other.receives if sending else end.other.sends
        for index, run in enumerate(runs):
            mine[tag + index] = (transfer, run)
            if tag + index in theirs:
                self._move(*((end, end.other) if sending else (end.other, end)), tag + index)

    def _move(self, sender: End, receiver: End, tag: int) -> None:
        """Both sides of a run are there: let its pieces travel."""
        fit = sender.host.compat == receiver.host.compat
        assert fit, "P2: blocks travel between engines whose KV differs"
        sending, source = sender.sends.pop(tag)
        receiving, target = receiver.receives.pop(tag)
        pieces = list(zip(_slots(source), _slots(target), strict=True))
        broken: tuple[End, ...] = ()
        if self.random.random() < self.faults.fail_transfer:
            broken = self.random.choice(((sender,), (receiver,), (sender, receiver)))
            names = ["receiver" if end is receiver else "sender" for end in broken]
            self.note(f"completion error: {' and '.join(names)}")
        if receiver in broken:
            del pieces[self.random.randrange(len(pieces)) :]
        cuts = sorted(self.random.randrange(len(pieces) + 1) for _ in range(2))
        time = self.clock.now
        for part in (pieces[: cuts[0]], pieces[cuts[0] : cuts[1]], pieces[cuts[1] :]):
            time += self._delay()
            self.clock.at(time, self._copy, sender, receiver, part)
        sides = ((sender, sending), (receiver, receiving))
        self.clock.at(time, self._arrived, sides, tag, broken)

    def _copy(self, sender: End, receiver: End, pieces: list[tuple[int, int]]) -> None:
        """Move some bytes, unless one of the ends is cut; a partition tears the run."""
        if not (sender.open and receiver.open):
            return
        if not self._passes(sender, lambda: self._copy(sender, receiver, pieces)):
            return
        source, target = sender.host.memory.values, receiver.host.memory.values
        for here, there in pieces:
            sender.host.may_touch(range(here // BLOCK, here // BLOCK + 1))
            receiver.host.may_touch(range(there // BLOCK, there // BLOCK + 1))
            target[there] = source[here]

    def _arrived(
        self, sides: tuple[tuple[End, Transfer], ...], tag: int, broken: tuple[End, ...]
    ) -> None:
        again = lambda: self._arrived(sides, tag, broken)  # noqa: E731
        if not all(end.open for end, _ in sides) or not self._passes(sides[0][0], again):
            return
        for end, transfer in sides:
            ok = end not in broken
            self.clock.after(self._delay() / 2, self._complete, end, transfer, tag, ok)

    def _complete(self, end: End, transfer: Transfer, tag: int, ok: bool) -> None:
        if end.transfers.get(transfer.key) is not transfer:
            return  # it was cut meanwhile
        transfer.left.discard(tag)
        transfer.ok = transfer.ok and ok
        if not transfer.left:
            del end.transfers[transfer.key]
            end.host.report(TransferEnded(transfer.key, transfer.ok))


def _slots(run: range) -> range:
    """The positions of a run's values in its memory."""
    return range(run.start * BLOCK, run.stop * BLOCK)
