"""The loop of an EngineCore process: ZMQ messages in, model steps, messages out.

One thread does it all. ZMQ's own I/O threads move the bytes and the hinge has its own thread, so
there is nothing to hand over between Python threads: between two steps the loop takes what has
arrived, and when there is nothing to compute it sleeps until a message, the hinge or a signal
wakes it. Messages that arrive while the model computes are taken before its results are sent, so
an aborted request says nothing more.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

import msgspec
import zmq

from diptych_engine.core import EngineCore
from diptych_frontend.curve import CurveGate
from diptych_frontend.zmq_frames import receive_frames
from diptych_protocol import (
    CurveKeys,
    DiptychError,
    EngineCoreOutputs,
    EngineCoreRequestType,
    SchedulerStats,
    UtilityOutput,
    wire,
)
from diptych_protocol.arrays import Frame

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25
IDLE_WAIT_MS = 1000
SENTINEL_LINGER_MS = 2000
MAX_QUEUED_MESSAGES = 10_000
"""A client that lags further behind than this is taken for lost."""


class CoreServer:
    """Serves one EngineCore on some ZMQ endpoints until told to stop."""

    def __init__(self, core: EngineCore, endpoints: Sequence[tuple[str, CurveKeys | None]]) -> None:
        """Bind every endpoint; those with keys admit only their holders.

        Raises `zmq.ZMQError` when an address is taken.
        """
        self._core = core
        self._context = zmq.Context()
        self._gates: list[CurveGate] = []
        self._sockets = [self._bind(endpoint, keys) for endpoint, keys in endpoints]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
        if core.connector is not None:
            self._poller.register(core.connector.wake_fd, zmq.POLLIN)
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller.register(self._stop_fd, zmq.POLLIN)
        self._clients: set[bytes] = set()
        self._told_draining: set[bytes] = set()
        self._stopping = False
        self._stats_due = 0.0

    def _bind(self, endpoint: str, keys: CurveKeys | None) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a vanished client is an error, not silence
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
        if keys is not None:
            gate = CurveGate(keys)
            gate.guard(self._context, socket)
            self._gates.append(gate)
        socket.bind(endpoint)
        return socket

    def stop(self) -> None:
        """Leave the loop before its next step. Safe from a signal handler."""
        self._stopping = True
        os.eventfd_write(self._stop_fd, 1)  # a signal alone does not end ZMQ's poll

    def run(self) -> None:
        """Serve until `stop`. Whatever goes wrong, every client is told that the core is gone."""
        try:
            while not self._stopping:
                self._turn()
            self._core.abort(list(self._core.scheduler.requests))
            self._send_outputs()
        except BaseException:
            log.exception("the engine core failed")
            raise
        finally:
            self._say_goodbye()

    def _turn(self) -> None:
        """Take what has arrived and run one step, if there is anything to compute."""
        core = self._core
        self._receive(0 if core.has_work else IDLE_WAIT_MS)
        if core.has_work:
            plan, result = core.start_step()
            self._receive(0)
            core.finish_step(plan, result)
            if not plan.scheduled:
                # Everything waits for blocks that only the hinge or an abort can free.
                self._receive(IDLE_WAIT_MS)
        self._send_outputs()
        if core.draining:
            self._tell_draining()

    # --- receiving ----------------------------------------------------------------------------

    def _receive(self, timeout_ms: int) -> None:
        """Handle all messages that are here; wait for the first at most `timeout_ms`."""
        ready = dict(self._poller.poll(timeout_ms))
        if not ready:
            return
        for index, socket in enumerate(self._sockets):
            if socket in ready:
                self._drain(index, socket)
        if self._core.connector is not None and self._core.connector.wake_fd in ready:
            self._core.handle_transfer_events()

    def _drain(self, index: int, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                (identity, *frames), arrays = receive_frames(socket, head=3)
            except zmq.Again:
                return
            client = bytes((index,)) + identity
            self._clients.add(client)
            try:
                self._handle(client, frames, arrays)
            except (msgspec.MsgspecError, ValueError) as exc:
                log.warning("a client sent a malformed message, dropped: %s", exc)

    def _handle(self, client: bytes, frames: list[bytes], arrays: list[Frame]) -> None:
        if len(frames) < 2:
            raise ValueError("a message without a payload")
        kind, message = frames
        payload = [message, *arrays]
        match EngineCoreRequestType(kind):
            case EngineCoreRequestType.ADD:
                self._core.add(wire.request_decoder.decode(payload), client)
            case EngineCoreRequestType.ABORT:
                self._core.abort(wire.abort_decoder.decode(payload))
            case EngineCoreRequestType.UTILITY:
                self._call(client, payload)
            case other:
                raise ValueError(f"{other.name} is not accepted from a socket")

    def _call(self, client: bytes, payload: list[Frame]) -> None:
        call = wire.utility_decoder.decode(payload)
        try:
            answer = UtilityOutput(call.call_id, result=self._core.call(call.method, call.args))
        except (DiptychError, TypeError, ValueError) as exc:
            answer = UtilityOutput(call.call_id, failure_message=f"{call.method}: {exc}")
        self._send(client, EngineCoreOutputs(utility_output=answer))

    # --- sending ------------------------------------------------------------------------------

    def _send_outputs(self) -> None:
        """Send every client its share of the step, with statistics now and then."""
        outputs = self._core.take_outputs()
        stats = self._stats_if_due(bool(outputs))
        for client, made in outputs.items():
            self._send(client, EngineCoreOutputs(outputs=made, scheduler_stats=stats))

    def _tell_draining(self) -> None:
        """Tell every client once, whether or not it has requests here."""
        untold = self._clients - self._told_draining
        self._told_draining |= untold
        for client in untold:
            self._send(client, EngineCoreOutputs(scheduler_stats=self._core.stats()))

    def _stats_if_due(self, talking: bool) -> SchedulerStats | None:
        now = time.monotonic()
        if not talking or (now < self._stats_due and self._core.has_work):
            return None
        self._stats_due = now + STATS_INTERVAL_S
        return self._core.stats()

    def _send(self, client: bytes, message: EngineCoreOutputs) -> None:
        socket = self._sockets[client[0]]
        try:
            socket.send_multipart((client[1:], *wire.encoder.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as exc:  # gone, or too far behind
            log.info("a client is unreachable: %s", exc)
            self._clients.discard(client)
            self._core.client_lost(client)

    def _say_goodbye(self) -> None:
        for client in self._clients:
            try:
                self._sockets[client[0]].send_multipart(
                    (client[1:], wire.ENGINE_CORE_DEAD), zmq.NOBLOCK
                )
            except zmq.ZMQError:
                continue  # it is gone already
        for socket in self._sockets:
            socket.close(linger=SENTINEL_LINGER_MS)
        for gate in self._gates:
            gate.close()
        self._core.close()
        self._context.term()
