"""What runs a hinge in the simulation: the part of `HingeThread`, over the simulated network."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from random import Random

from sim_clock import Clock
from sim_model import Memory, PoisoningPool
from sim_network import Network
from sim_tally import LEASE_REFUSALS, LOAD_FAILURES, named

from diptych_kv_transfer.hinge_thread import Command
from diptych_kv_transfer.tables.actions import (
    Action,
    Address,
    Connect,
    Event,
    Fence,
    LeaseEnded,
    LoadEnded,
    PrefixAsked,
    PrefixLate,
    ReceiveBlocks,
    Report,
    Send,
    SendBlocks,
)
from diptych_kv_transfer.tables.hinge import Hinge
from diptych_kv_transfer.tables.messages import AnyMessage, Closed, Open, Opened, Refused, encode
from diptych_protocol import KVTransferStats

KEPT_IN_VAIN = "nobody came for it"
WAKE_S = 0.0005
"""How long a thread takes to wake up, at most."""


class SimDriver:
    """One engine's hinge on the network. Like the thread it stands for, it runs beside the core,
    so anything may happen between a command and its execution."""

    def __init__(
        self, hinge: Hinge, address: Address, network: Network, memory: Memory, pool: PoisoningPool
    ) -> None:
        self.hinge = hinge
        self.address = address
        self.memory = memory
        self.alive = True
        self.stalled = False
        self.reports: Counter[str] = Counter()
        """How often each kind of end was reported: lease outcomes, `load ok` and `load failed`."""
        self.wake_core: Callable[[], None] = lambda: None
        self.confirmed: set[str] = set()
        """Leases that were said to have been held while they were read."""
        self.validate: Callable[[str, str], None] = lambda *_: None
        """Called with the id of a request whose load is said to be good, and that of the lease if
        it is one of a prefix."""
        self._prefix_leases: dict[str, str] = {}
        """By request, the lease that was last asked for by names."""
        self.saw: Callable[[SimDriver], None] = lambda _: None
        """Called after each change of the hinge."""
        self._network = network
        self._clock: Clock = network.clock
        self._random: Random = network.random
        self.pool = pool
        self._offset = self._random.random() * 1000
        """This machine's clock began earlier: times of two machines cannot be compared."""
        self._commands: deque[Command] = deque()
        self._ended: deque[Report] = deque()
        self._backlog: deque[Event] = deque()
        self._timer = math.inf

    # --- HingeDriver: for the core ------------------------------------------------------------

    @property
    def port(self) -> int:
        return self.address[1]

    @property
    def wake_fd(self) -> int:
        """Nobody polls here: `wake_core` is called instead."""
        return -1

    def tell(self, command: Command) -> None:
        if not self._commands:
            self._clock.after(self._random.random() * WAKE_S, self._obey)
        self._commands.append(command)

    def poll_events(self) -> list[Report]:
        events = list(self._ended)
        self._ended.clear()
        return events

    def stats(self) -> KVTransferStats:
        return KVTransferStats()

    def close(self) -> None:
        if self.alive:
            self.alive = False
            self._network.crash(self)

    # --- Host: for the network ----------------------------------------------------------------

    def report(self, event: Event) -> None:
        self._backlog.append(event)
        self._turn()

    @property
    def compat(self) -> dict[str, int | str]:
        return self.hinge.me.compat

    def may_touch(self, blocks: range) -> None:
        for block in blocks:
            assert self.pool.holders(block) > 0, f"P2: block {block} is touched though it is free"

    def stall(self) -> None:
        """SIGSTOP: what happens from now on is noticed later."""
        self.stalled = True

    def resume(self) -> None:
        self.stalled = False
        self._obey()

    # --- the thread ---------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """By this machine's clock."""
        return self._clock.now + self._offset

    def _obey(self) -> None:
        """Carry commands out. What the hinge was doing when they came is done before."""
        if self.stalled or not self.alive:
            return
        while self._commands:
            self._do(self._commands.popleft()(self.hinge, self.now))
        self._turn()

    def _turn(self) -> None:
        if self.stalled or not self.alive:
            return
        while self._backlog:
            self._do(self.hinge.handle(self._backlog.popleft(), self.now))
        overdue = self.hinge.tick(self.now)
        if any(isinstance(x, Send) and isinstance(x.message, Closed) for x in overdue):
            self._network.note("lease expired during a read")
        self._do(overdue)
        self._set_timer()
        self.saw(self)

    def _set_timer(self) -> None:
        deadline = self.hinge.next_deadline()
        if deadline < self._timer or self._timer <= self.now:
            self._timer = deadline
            if deadline < math.inf:
                self._clock.at(max(self._clock.now, deadline - self._offset), self._turn)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    self._note_message(message)
                    self._network.send(peer, encode(message))
                case SendBlocks(peer, _, tag, runs):
                    self._network.send_blocks(peer, action.key, tag, runs)
                case ReceiveBlocks(peer, _, tag, runs):
                    self._network.receive_blocks(peer, action.key, tag, runs)
                case Connect(address):
                    self._network.connect(self, address)
                case Fence(peer):
                    self._network.note("peer cut off")
                    self._network.fence(peer)
                case LeaseEnded() | LoadEnded():
                    self._report_end(action)
                case PrefixAsked() | PrefixLate():
                    if isinstance(action, PrefixLate):
                        self._network.note("prefix late")
                    self._ended.append(action)
                    self.wake_core()

    def _note_message(self, message: AnyMessage) -> None:
        match message:
            case Refused():
                self._network.note(f"lease refused: {named(message.reason, LEASE_REFUSALS)}")
            case Closed(lease_id, held):
                if held:
                    self.confirmed.add(lease_id)
                else:
                    self._network.note("read not confirmed")
            case Open(lease_id, names=names) if names:
                [load] = [
                    x for x in self.hinge.loads.loads.values() if x.lease.lease_id == lease_id
                ]
                self._prefix_leases[load.request_id] = lease_id
            case Opened(lease_id, num_blocks=num_blocks) if num_blocks:
                lease = self.hinge.leases.leases[lease_id]
                asked = 0 if lease.claim is None else len(lease.claim.asked.names)
                self._network.note(f"prefix lent{' in part' if num_blocks < asked else ''}")
            case _:
                pass

    def _report_end(self, event: LeaseEnded | LoadEnded) -> None:
        if isinstance(event, LeaseEnded):
            self.reports[f"lease {event.outcome}"] += 1
        elif event.reason == KEPT_IN_VAIN:
            self.reports[KEPT_IN_VAIN] += 1
        else:
            self.reports["load ok" if event.ok else "load failed"] += 1
            if not event.ok:
                self._network.note(f"load failed: {named(event.reason, LOAD_FAILURES)}")
            ended = self.reports["load ok"] + self.reports["load failed"]
            loads = self.hinge.loads
            started = loads.totals.loads_started + loads.prefixes_started
            assert ended <= started, "P6: a load ended twice"
            if event.ok:
                prefix = self._prefix_leases.get(event.request_id, "") if event.num_tokens else ""
                self.validate(event.request_id, prefix)
        self._ended.append(event)
        self.wake_core()
