"""KVConnector: the engine core's end of the hinge.

The core calls it from its own thread; a second thread runs the lease and load tables over the
transport. Commands go in through a queue, events come out through another, and a descriptor
becomes readable when there are some, so the core never polls.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from diptych_kv_transfer.actions import (
    Action,
    Connect,
    Fence,
    LeaseEnded,
    LoadEnded,
    ReceiveBlocks,
    Send,
    SendBlocks,
)
from diptych_kv_transfer.leases import LeaseState, LeaseTable
from diptych_kv_transfer.loads import LeaseRef, LoadTable, coalesce
from diptych_kv_transfer.messages import (
    Close,
    Hello,
    Open,
    Reject,
    RemoteProtocolError,
    Renew,
    decode,
    encode,
)
from diptych_kv_transfer.transport import (
    Connected,
    ConnectFailed,
    Event,
    PeerLost,
    Received,
    TransferEnded,
    Transport,
)
from diptych_kv_transfer.ucx import UcxTransport
from diptych_protocol import KVTransferConfig, KVTransferParams, KVTransferStats, fingerprint

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
Command = Callable[[float], list[Action]]


class KVConnector:
    """Lends the blocks of finished prefills to others, and fetches theirs."""

    def __init__(
        self,
        config: KVTransferConfig,
        *,
        engine_id: str,
        epoch: str,
        compat: Mapping[str, str | int],
        kv_memory: NDArray[np.uint8],
    ) -> None:
        """Listen, and start the thread.

        Args:
            kv_memory: [num_blocks, block_bytes], contiguous; must outlive the connector.

        Raises `OSError` when the address cannot be had.
        """
        self._hello = Hello(engine_id, epoch, dict(compat))
        self._memory = kv_memory
        self._lease_seconds = config.lease_seconds
        self._leases = LeaseTable(config.lease_seconds)
        self._loads = LoadTable(self._hello, config.load_timeout_s)
        self._transport: Transport = UcxTransport(config.listen_host, config.listen_port)
        self.host = config.advertise_host or config.listen_host
        self.port = self._transport.port
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        """Readable while `poll_events` has something to return."""
        self._commands: deque[Command] = deque()
        self._events: deque[LeaseEnded | LoadEnded] = deque()
        self._totals = KVTransferStats()
        self._stopping = False
        self._failure: Exception | None = None
        self._greeted: set[int] = set()
        """Peers that have said who they are."""
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    # --- for the core -------------------------------------------------------------------------

    def grant(
        self,
        request_id: str,
        block_ids: list[int],
        token_ids: list[int],
        first_token_ids: list[int],
        cache_salt: str | None,
    ) -> KVTransferParams:
        """Lend the blocks that hold the KV of `token_ids`; LeaseEnded gives them back.

        The answer tells a decode engine how to fetch them, and what was sampled after them.
        """
        lease_id = secrets.token_hex(16)
        digest = digest_of(token_ids, cache_salt)
        self._tell(lambda now: self._grant(lease_id, request_id, block_ids, digest, now))
        return KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self._hello.engine_id,
            remote_request_id=request_id,
            remote_block_ids=[block_ids],
            remote_host=self.host,
            remote_port=self.port,
            remote_num_tokens=len(token_ids),
            lease_id=lease_id,
            lease_seconds=self._lease_seconds,
            epoch=self._hello.epoch,
            compat=fingerprint(self._hello.compat),
            first_token_ids=first_token_ids,
        )

    def hold(self, request_id: str, params: KVTransferParams) -> None:
        """A request with a hand-off queues: connect to its P, and keep the lease alive."""
        lease = lease_of(params)
        seconds = params.lease_seconds or self._lease_seconds
        self._tell(lambda now: self._loads.hold(request_id, lease, seconds, now))

    def start_load(
        self,
        request_id: str,
        params: KVTransferParams,
        indices: list[int],
        local_block_ids: list[int],
        token_ids: list[int],
        cache_salt: str | None,
    ) -> None:
        """Fetch block `indices[i]` of the lease into `local_block_ids[i]`; ends in LoadEnded.

        The request must be held. `token_ids` are those whose KV the lease must be for.
        """
        remote = (params.remote_block_ids or [[]])[0]
        runs, local_runs = coalesce(indices, remote, local_block_ids)
        digest, tag = digest_of(token_ids, cache_salt), secrets.randbits(60)
        self._tell(lambda now: self._loads.start(request_id, digest, tag, runs, local_runs, now))

    def cancel_load(self, request_id: str) -> None:
        """Give up a held or started load, and tell P. A started one still ends in LoadEnded."""
        self._tell(lambda now: self._loads.cancel(request_id))

    def reject(self, params: KVTransferParams) -> None:
        """Tell P that its lease is not needed. Repeating it is harmless."""
        lease = lease_of(params)
        self._tell(lambda now: self._loads.reject(lease))

    def revoke(self, params: KVTransferParams) -> None:
        """End a lease of our own."""
        lease_id = params.lease_id or ""
        self._tell(lambda now: self._leases.revoke(lease_id))

    def revoke_all(self) -> None:
        """End every lease of our own; those that are being read end when that is over."""
        self._tell(lambda now: self._leases.revoke_all())

    def poll_events(self) -> list[LeaseEnded | LoadEnded]:
        """What has ended since the last call.

        Raises `RuntimeError` when the thread has failed: the engine cannot go on without it.
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
        """Totals since the start, and what is held now."""
        leases, loads, totals = self._leases, self._loads, self._totals
        totals.leases_held = len(leases.leases)
        totals.leases_granted = leases.counts[LeaseState.GRANTED]
        totals.leases_released = leases.counts[LeaseState.RELEASED]
        totals.leases_revoked = leases.counts[LeaseState.REVOKED]
        totals.leases_expired = leases.counts[LeaseState.EXPIRED]
        totals.blocks_held = leases.blocks_held
        totals.loads_in_flight = len(loads.loads)
        totals.loads_completed = loads.completed
        totals.loads_failed = loads.failed
        totals.stale_reads_refused = leases.stale_reads_refused
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

    def _tell(self, command: Command) -> None:
        self._commands.append(command)
        self._transport.wake()

    def _grant(
        self, lease_id: str, request_id: str, block_ids: list[int], digest: str, now: float
    ) -> list[Action]:
        self._leases.grant(lease_id, request_id, block_ids, digest, now)
        return []

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as exc:
            log.exception("the KV transfer thread failed")
            self._failure = exc
            os.eventfd_write(self.wake_fd, 1)

    def _turn(self) -> None:
        """Wait for news, let the tables decide, and carry their actions out."""
        now = time.monotonic()
        deadline = min(self._leases.next_deadline(), self._loads.next_deadline())
        timeout = max(0.0, deadline - now) if math.isfinite(deadline) else None
        events = self._transport.poll(0.0 if self._commands else timeout)
        now = time.monotonic()
        while self._commands:
            self._do(self._commands.popleft()(now))
        for event in events:
            self._do(self._handle(event, now))
        self._do(self._leases.tick(now))
        self._do(self._loads.tick(now))

    def _handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case Connected(peer, address):
                if address is None:
                    return [Send(peer, self._hello)]
                return self._loads.connected(address, peer)
            case ConnectFailed(address, reason):
                return self._loads.connect_failed(address, reason)
            case Received(peer, data):
                return self._receive(peer, data, now)
            case TransferEnded(key, ok):
                side, _, name = key.partition(" ")
                if side == "send":
                    return self._leases.sends_ended(name)
                return self._loads.receives_ended(name, ok=ok)
            case PeerLost(peer):
                self._greeted.discard(peer)
                return [*self._leases.peer_lost(peer), *self._loads.peer_lost(peer)]

    def _receive(self, peer: int, data: bytes, now: float) -> list[Action]:
        try:
            message = decode(data)
            if peer not in self._greeted and not isinstance(message, Hello):
                raise RemoteProtocolError("it spoke before it said who it is")
        except RemoteProtocolError as exc:
            log.warning("a peer broke the protocol, cutting it off: %s", exc)
            return [Fence(peer)]
        match message:
            case Hello():
                self._greeted.add(peer)
                return self._loads.greeted(peer, message, now)
            case Open() | Close() | Renew() | Reject():
                return self._leases.receive(peer, message, now)
            case _:
                return self._loads.receive(peer, message, now)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    self._transport.send(peer, encode(message))
                case SendBlocks(peer, lease_id, tag, runs):
                    self._totals.blocks_sent += sum(map(len, runs))
                    self._totals.bytes_sent += sum(map(len, runs)) * self._memory.shape[1]
                    buffers = [self._bytes_of(run) for run in runs]
                    self._transport.send_blocks(peer, f"send {lease_id}", tag, buffers)
                case ReceiveBlocks(peer, request_id, tag, runs):
                    buffers = [self._bytes_of(run) for run in runs]
                    self._transport.receive_blocks(peer, f"receive {request_id}", tag, buffers)
                case Connect(address):
                    self._transport.connect(address)
                case Fence(peer):
                    self._transport.fence(peer)
                case LeaseEnded() | LoadEnded():
                    self._report(action)

    def _bytes_of(self, run: range) -> NDArray[np.uint8]:
        return self._memory[run.start : run.stop].reshape(-1)

    def _report(self, event: LeaseEnded | LoadEnded) -> None:
        if isinstance(event, LoadEnded) and event.ok:
            self._totals.blocks_received += event.num_blocks
            self._totals.bytes_received += event.num_blocks * self._memory.shape[1]
            self._totals.seconds_receiving += event.seconds
        self._events.append(event)
        os.eventfd_write(self.wake_fd, 1)


def lease_of(params: KVTransferParams) -> LeaseRef:
    """The lease that parsed `do_remote_prefill` parameters name."""
    return LeaseRef(
        lease_id=params.lease_id or "",
        address=(params.remote_host or "", params.remote_port or 0),
        engine_id=params.remote_engine_id or "",
        epoch=params.epoch or "",
    )


def digest_of(token_ids: list[int], cache_salt: str | None) -> str:
    """What a lease is for: these tokens, under this salt."""
    content = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16)
    content.update((cache_salt or "").encode())
    return content.hexdigest()
