"""Runs a hinge over a transport, in a thread of its own.

Commands enter through a queue, and results leave through another one. A file descriptor becomes
readable when there are results, so that the core never polls.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from diptych_kv_transfer.memory.shard import MemoryRegion
from diptych_kv_transfer.regions import Regions
from diptych_kv_transfer.tables.actions import (
    Action,
    Connect,
    Event,
    Fence,
    LeaseEnded,
    LoadEnded,
    PeerLost,
    PrefixAsked,
    PrefixLate,
    ReceiveBlocks,
    Report,
    Send,
    SendBlocks,
    Stage,
    TransferEnded,
    Unpack,
)
from diptych_kv_transfer.tables.hinge import Hinge
from diptych_kv_transfer.tables.lease import LeaseState
from diptych_kv_transfer.tables.load import waiting_for_room
from diptych_kv_transfer.tables.messages import encode
from diptych_kv_transfer.tables.send_room import SendRoom
from diptych_kv_transfer.transports import Transport
from diptych_protocol import KVTransferStats

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
NO_BLOCKS = MemoryRegion.of(np.zeros(1, np.uint8))
"""The offer for blocks that cannot be read. Nobody asks for a byte of it."""
Command = Callable[[Hinge, float], list[Action]]
"""A change that the core requests from the hinge, with the time."""


class HingeThread:
    """The one thread that touches a hinge and its transport."""

    def __init__(
        self, hinge: Hinge, transport: Transport, regions: Regions, staging_bytes: int
    ) -> None:
        """Start the thread. From now on only the thread uses the regions.

        staging_bytes: room for what is sent from memory on a device.
        """
        self._hinge = hinge
        self._transport = transport
        self._regions = regions
        self._send_room = SendRoom(staging_bytes // regions.block_bytes)
        self.port = transport.port
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        """Readable while `poll_events` has something to return."""
        self._commands: deque[Command] = deque()
        self._events: deque[Report] = deque()
        self._broken: dict[str, str] = {}
        """Loads for whose blocks there was no room, and why."""
        self._incoming_bytes: Counter[str] = Counter()
        """Bytes that have room and may be on their way, by load."""
        self._stopping = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    # --- for the core -------------------------------------------------------------------------

    def tell(self, command: Command) -> None:
        """Queue a command for the thread."""
        self._commands.append(command)
        self._transport.wake()

    def poll_events(self) -> list[Report]:
        """Return what has ended, and what other engines asked for, since the last call.

        Raises `RuntimeError` when the thread has failed: the engine cannot continue without it.
        """
        if self._failure is not None:
            raise RuntimeError("the KV transfer thread failed") from self._failure
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return []
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def stats(self) -> KVTransferStats:
        """Return totals since the start, and what is held now."""
        leases, loads, totals = self._hinge.leases, self._hinge.loads, self._hinge.totals
        held = leases.held
        totals.leases_held = held[LeaseState.GRANTED] + held[LeaseState.READING]
        totals.leases_promised_now = held[LeaseState.PROMISED]
        totals.leases_draining = held.total() - totals.leases_held - totals.leases_promised_now
        totals.leases_promised = leases.counts[LeaseState.PROMISED]
        totals.leases_withdrawn = leases.counts[LeaseState.WITHDRAWN]
        totals.leases_granted = leases.counts[LeaseState.GRANTED]
        totals.leases_released = leases.counts[LeaseState.RELEASED]
        totals.leases_revoked = leases.counts[LeaseState.REVOKED]
        totals.leases_expired = leases.counts[LeaseState.EXPIRED]
        totals.blocks_held = leases.blocks_held
        totals.loads_in_flight = loads.in_flight
        totals.loads_waiting_for_room = waiting_for_room(list(loads.loads.values()))
        totals.staging_bytes = self._regions.staged_bytes
        totals.seconds_receiving = loads.waits.hand_off_seconds
        totals.hand_off_counts = list(loads.waits.hand_off_counts)
        totals.prefix_fetches_now = loads.prefixes_in_flight
        totals.prefix_seconds = loads.waits.prefix_seconds
        totals.newest_moves = list(loads.waits.moves)
        totals.transport = self._transport.name
        return totals

    def close(self) -> None:
        """Cut all connections and end the thread. Safe to call twice."""
        if self._stopping:
            return
        self._stopping = True
        self._transport.wake()
        self._thread.join(CLOSE_TIMEOUT_S)
        self._transport.close()
        os.close(self.wake_fd)

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as exc:
            log.exception("the KV transfer thread failed")
            self._failure = exc
            os.eventfd_write(self.wake_fd, 1)

    def _turn(self) -> None:
        """Wait for news, let the hinge decide, and carry its actions out."""
        now = time.monotonic()
        deadline = self._hinge.next_deadline()
        timeout = None if deadline == math.inf else max(0.0, deadline - now)
        events = self._transport.poll(0.0 if self._commands else timeout)
        now = time.monotonic()
        while self._commands:
            self._do(self._commands.popleft()(self._hinge, now))
        for event in events:
            self._make_room(event)
            self._do(self._hinge.handle(event, now))
        self._do(self._hinge.tick(now))

    def _do(self, actions: list[Action]) -> None:
        regions = self._regions
        for action in actions:
            match action:
                case Send(peer, message):
                    self._transport.send(peer, encode(message))
                case SendBlocks():
                    self._send([action] if not regions.on_device else self._send_room.ask(action))
                case ReceiveBlocks():
                    self._receive(action)
                case Stage(request_id, staging):
                    with self._costs_only(request_id):
                        regions.stage(request_id, staging)
                case Unpack(request_id):
                    with self._costs_only(request_id):
                        regions.unpack(request_id)
                case Connect(address):
                    self._transport.connect(address)
                case Fence(peer):
                    self._transport.fence(peer)
                case LeaseEnded() | LoadEnded() | PrefixAsked() | PrefixLate():
                    self._report(action)

    @contextmanager
    def _costs_only(self, request_id: str) -> Iterator[None]:
        """What goes wrong with memory, the host's or a device's, fails this load and no other.

        What P sends for it nobody receives: both sides see that their sizes differ, and let go.
        """
        try:
            yield
        except Exception as exc:
            log.exception("request %s: its blocks have no room", request_id)
            self._broken[request_id] = f"its blocks have no room here: {exc}"

    def _receive(self, action: ReceiveBlocks) -> None:
        request_id, targets = action.request_id, list[MemoryRegion]()
        if request_id not in self._broken:
            staged_for = request_id if action.staged else None
            with self._costs_only(request_id):
                targets = self._regions.incoming(action.runs, staged_for, action.part)
        self._incoming_bytes[request_id] += sum(target.length for target in targets)
        self._transport.receive_blocks(action.peer, action.key, action.tag, targets)

    def _send(self, ready: list[SendBlocks]) -> None:
        for action in ready:
            try:
                sources = self._regions.outgoing(action.key, action.runs, action.part)
            except Exception:  # of the host's memory or the device: it costs this transfer
                log.exception("lease %s: its blocks cannot be sent", action.lease_id)
                sources = [NO_BLOCKS]
            else:
                self._hinge.totals.blocks_sent += sum(map(len, action.runs))
                self._hinge.totals.bytes_sent += sum(source.length for source in sources)
            self._transport.send_blocks(action.peer, action.key, action.tag, sources)

    def _make_room(self, event: Event) -> None:
        """Copies that nobody reads any more make room for the next ones."""
        if not self._regions.on_device:
            return
        match event:
            case TransferEnded(key):
                self._regions.sent(key)
                self._send(self._send_room.ended(key))
            case PeerLost(peer):
                self._send(self._send_room.peer_lost(peer))
            case _:
                pass

    def _report(self, event: Report) -> None:
        if isinstance(event, LoadEnded):
            self._regions.drop(event.request_id)
            num_bytes = self._incoming_bytes.pop(event.request_id, 0)
            problem = self._broken.pop(event.request_id, None)
            if problem is not None:
                event = LoadEnded(event.request_id, False, problem)
            if event.ok:
                self._hinge.totals.blocks_received += event.num_blocks
                self._hinge.totals.bytes_received += num_bytes
        self._events.append(event)
        os.eventfd_write(self.wake_fd, 1)
