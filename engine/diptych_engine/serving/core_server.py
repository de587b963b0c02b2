"""The loop of an EngineCore process: ZMQ messages in, model steps, messages out.

One thread does it all. ZMQ's own I/O threads move the bytes and the hinge has its own thread, so
there is nothing to hand over between Python threads: between two steps the loop takes what has
arrived, and when there is nothing to compute it sleeps until a message, the hinge or a signal
wakes it. Messages that arrive while the model computes are taken before its results are sent, so
an aborted request says nothing more.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

import zmq

from diptych_engine.control.core import AT_WORK, SHUTTING_DOWN, EngineCore, Posture
from diptych_engine.control.shutdown import Shutdown
from diptych_engine.scheduling.request import Pending, StepPlan
from diptych_engine.serving.heartbeat_sender import HeartbeatSender
from diptych_frontend.core_client.client import receive_frames
from diptych_frontend.core_client.core_socket import Farewell, bind_core_socket
from diptych_frontend.core_client.curve import CurveGate
from diptych_frontend.core_client.prefix_news import PrefixNews
from diptych_protocol import (
    UNREADABLE,
    CurveKeys,
    DiptychError,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    InvalidRequestError,
    SchedulerStats,
    UtilityCall,
    UtilityOutput,
    wire,
)
from diptych_protocol.arrays import Frame
from diptych_protocol.salvage import asker_of

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25
IDLE_WAIT_MS = 1000
SENTINEL_LINGER_MS = 2000
MAX_PENDING_CALLS = 256
"""Utility calls that may wait for their answers at the same time."""
FEW_CLIENTS = 16
"""So many are never looked through for those that have vanished."""


class CoreServer:
    """Serves one EngineCore on some ZMQ endpoints until told to stop."""

    def __init__(
        self,
        core: EngineCore,
        endpoints: Sequence[tuple[str, CurveKeys | None]],
        shutdown_timeout_s: float = 0.0,
        rank: int = 0,
    ) -> None:
        """Bind every endpoint; those with keys admit only their holders.

        `shutdown_timeout_s`: how long requests may take to end after `stop`. `rank`: the core's
        place among those of its engine.

        Raises `zmq.ZMQError` when an address is taken.
        """
        self._core = core
        self._rank = rank
        self._context = zmq.Context()
        self._gates: list[CurveGate] = []
        self._sockets = [self._bind(endpoint, keys) for endpoint, keys in endpoints]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
        if core.connector is not None:
            self._poller.register(core.connector.wake_fd, zmq.POLLIN)
        for descriptor in core.watched:
            self._poller.register(descriptor, zmq.POLLIN)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._clients: dict[bytes, int] = {}
        """Client -> requests that it has sent. Those that are known to be gone are not here."""
        self._look_through_at = FEW_CLIENTS
        """At more clients than these, each is tried."""
        self._told: dict[bytes, Posture] = {}
        """Client -> the posture of the core that it was told last."""
        self._pending: dict[tuple[bytes, int], Future[Any]] = {}
        """(client, call id) -> the answer that is to come."""
        self._answered: deque[tuple[bytes, UtilityOutput]] = deque()
        """Answers that came later, from whatever thread."""
        self._shutdown = Shutdown()
        self._shutdown_timeout_s = shutdown_timeout_s
        self._stop_wanted = False
        self._last_words = ""
        """Why this core ends, if not because it was told to."""
        self._stats_due = 0.0
        self._prefix_news = PrefixNews(core.scheduler.pool, core.adapters.digests)
        self._heartbeat = HeartbeatSender(core, rank, self._send_frames, self._num_received)

    def _bind(self, endpoint: str, keys: CurveKeys | None) -> zmq.Socket[bytes]:
        socket, gate = bind_core_socket(self._context, endpoint, keys)
        if gate is not None:
            self._gates.append(gate)
        return socket

    def stop(self) -> None:
        """Leave as soon as requests have ended or were aborted. Safe from a signal handler."""
        self._stop_wanted = True
        self._wake()

    def _wake(self) -> None:
        """End the loop's wait: neither a signal nor another thread ends ZMQ's poll."""
        os.eventfd_write(self._wake_fd, 1)

    def run(self) -> None:
        """Serve until `stop`. Whatever goes wrong, every client is told that the core is gone."""
        try:
            while not self._is_over():
                self._turn()
            self._receive(0)  # what came meanwhile has its answer, too
            self._core.abort_all()
            self._send_outputs()
        except BaseException as exc:
            log.exception("the engine core failed")
            self._last_words = str(exc) or type(exc).__name__
            raise
        finally:
            self._say_goodbye()

    def _is_over(self) -> bool:
        if not self._stop_wanted:
            return False
        now = time.monotonic()
        if not self._core.leaving:
            self._core.leaving = True
            self._shutdown.request(now, self._shutdown_timeout_s)
            self._reject_pending()
        more = self._core.scheduler.can_finish_more
        return self._shutdown.advance(now, can_finish_more=more)

    def _turn(self) -> None:
        """Take what has arrived and run one step, if there is anything to compute."""
        core = self._core
        self._receive(0 if self._has_work() else self._idle_wait_ms())
        if self._has_work():
            begin = time.monotonic()
            if self._prefix_news.expected:
                self._tell_prefixes(at_once=True)
            plan, pending = self._start_step()
            self._receive(0)
            core.finish_step(plan, pending)
            self._heartbeat.stepped(plan, time.monotonic() - begin)
            if not plan.scheduled:
                # Everything waits for blocks that only the hinge or an abort can free.
                self._receive(self._idle_wait_ms())
        if self._told or core.posture != AT_WORK:
            self._tell_posture()
        self._send_outputs()
        if self._prefix_news.followers:
            self._tell_prefixes(at_once=not core.has_work)
        core.deferred.settle()
        self._send_answers()
        self._heartbeat.turned()

    def _has_work(self) -> bool:
        return self._core.has_work

    def _start_step(self) -> tuple[StepPlan, Pending]:
        return self._core.start_step()

    def _idle_wait_ms(self) -> int:
        """As long as nothing can be overdue."""
        now = time.monotonic()
        beat_s = self._heartbeat.wait_s(now)
        wait_ms = IDLE_WAIT_MS if beat_s is None else math.ceil(beat_s * 1000)
        if self._stop_wanted:
            wait_ms = min(wait_ms, int(self._shutdown.remaining_s(now) * 1000))
        return wait_ms

    # --- receiving ----------------------------------------------------------------------------

    def _receive(self, timeout_ms: int) -> None:
        """Handle all messages that are here; wait for the first at most `timeout_ms`."""
        ready = dict(self._poller.poll(timeout_ms))
        if not ready:
            return
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        for index, socket in enumerate(self._sockets):
            if socket in ready:
                self._drain(index, socket)
        for descriptor, react in self._core.watched.items():
            if descriptor in ready:
                react()
        if self._core.connector is not None and self._core.connector.wake_fd in ready:
            self._core.handle_transfer_events()

    def _drain(self, index: int, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                (identity, *frames), arrays = receive_frames(socket, head=3)
            except zmq.Again:
                return
            client = bytes((index,)) + identity
            self._clients.setdefault(client, 0)
            if len(self._clients) > self._look_through_at:
                self._forget_vanished()
            try:
                self._handle(client, frames, arrays)
            except (ValueError, *UNREADABLE) as exc:
                self._answer_malformed(client, frames, exc)

    @property
    def num_clients(self) -> int:
        """Clients that this core may have something to tell."""
        return len(self._clients)

    def _forget_vanished(self) -> None:
        """Drop clients that have gone without a word, which only an attempt to write to them tells.

        It happens each time that their number has doubled, so it costs a message for each new one.
        """
        nothing = wire.encoder.encode(EngineCoreOutputs())
        for client in list(self._clients):
            self._send_frames(client, nothing)
        self._look_through_at = max(FEW_CLIENTS, 2 * len(self._clients))

    def _handle(self, client: bytes, frames: list[bytes], arrays: list[Frame]) -> None:
        if len(frames) < 2:
            raise ValueError("a message without a payload")
        kind, message = frames
        payload = [message, *arrays]
        match EngineCoreRequestType(kind):
            case EngineCoreRequestType.ADD:
                self._clients[client] = self._clients.get(client, 0) + 1
                self._add(wire.request_decoder.decode(payload), client)
            case EngineCoreRequestType.ABORT:
                self._core.abort(wire.abort_decoder.decode(payload))
            case EngineCoreRequestType.UTILITY:
                self._call(client, payload)
            case other:
                raise ValueError(f"{other.name} is not accepted from a socket")

    def _answer_malformed(self, client: bytes, frames: list[bytes], error: Exception) -> None:
        """Who waits for the answer to a message that cannot be read gets an error, if the message
        says so much."""
        self._core.malformed_messages += 1
        reason = f"the message cannot be read: {error}"
        request_id, call_id = asker_of(frames)
        if request_id is not None:
            self._core.unreadable(request_id, client, reason)
        elif call_id is not None:
            self._send_answer(client, UtilityOutput(call_id, failure_message=reason))
        else:
            log.warning("a client sent a malformed message, dropped: %s", error)

    def _add(self, request: EngineCoreRequest, client: bytes) -> None:
        self._core.add(request, client)
        news, scheduler = self._prefix_news, self._core.scheduler
        if news.tells_others and (names := scheduler.will_remember(request.request_id)):
            news.expect(names)

    def _call(self, client: bytes, payload: list[Frame]) -> None:
        call = wire.utility_decoder.decode(payload)
        if call.method == wire.FOLLOW_PREFIXES:
            self._follow_prefixes(client)
            return
        if call.method == wire.FOLLOW_HEARTBEAT:
            self._heartbeat.follow(client, *call.args[:1])
            return
        self._heartbeat.before_call(call.method)
        try:
            if len(self._pending) >= MAX_PENDING_CALLS:
                raise DiptychError("too many calls wait for their answers already")
            result = self._core.call(call.method, call.args, wire.utility_decoder.convert)
        except Exception as exc:  # it fails the call, not the engine
            self._send_answer(client, _failure(call.call_id, call.method, exc))
            return
        if isinstance(result, Future):
            self._pending[client, call.call_id] = result
            result.add_done_callback(partial(self._take_answer, client, call))
        else:
            self._send_answer(client, UtilityOutput(call.call_id, result=result))

    def _take_answer(self, client: bytes, call: UtilityCall, done: Future[Any]) -> None:
        """A pending call has ended. May run in any thread."""
        try:
            answer = UtilityOutput(call.call_id, result=done.result())
        except (Exception, CancelledError) as exc:
            answer = _failure(call.call_id, call.method, exc)
        self._answered.append((client, answer))
        self._wake()

    def _reject_pending(self) -> None:
        """Calls that are not answered yet will not be."""
        rejected, self._pending = self._pending, {}
        for (client, call_id), pending in rejected.items():
            pending.cancel()
            self._send_answer(client, UtilityOutput(call_id, failure_message=SHUTTING_DOWN))

    # --- sending ------------------------------------------------------------------------------

    def _send_outputs(self) -> None:
        """Send every client its share of the step, with statistics now and then."""
        outputs = self._core.take_outputs()
        stats = self._stats_if_due(bool(outputs))
        events = self._core.scheduler.take_stations()
        for client in outputs.keys() | events.keys():
            made = outputs.get(client, [])
            message = EngineCoreOutputs(self._rank, made, stats, journey_events=events.get(client))
            message.finished_requests = {x.request_id for x in made if x.finished} or None
            if stats is not None:
                message.requests_received = self._num_received(client)
            self._send(client, message)

    def _num_received(self, client: bytes) -> int:
        return self._clients.get(client, 0)

    def _send_answers(self) -> None:
        while self._answered:
            client, answer = self._answered.popleft()
            if self._pending.pop((client, answer.call_id), None) is not None:
                self._send_answer(client, answer)

    def _send_answer(self, client: bytes, answer: UtilityOutput) -> None:
        if answer.call_id < 0:  # nobody waits for it
            if answer.failure_message is not None:
                log.info("a call without an answer: %s", answer.failure_message)
            return
        try:
            frames = wire.encoder.encode(EngineCoreOutputs(self._rank, utility_output=answer))
        except (TypeError, ValueError) as exc:  # a result that msgpack has no form for
            failure = UtilityOutput(answer.call_id, failure_message=str(exc))
            frames = wire.encoder.encode(EngineCoreOutputs(self._rank, utility_output=failure))
        self._send_frames(client, frames)

    def _follow_prefixes(self, client: bytes) -> None:
        self._tell_prefixes(at_once=True)
        snapshot = self._prefix_news.follow(client)
        if snapshot is None:
            log.warning("a client may not follow the prefixes: too many do")
        else:
            self._send(client, EngineCoreOutputs(self._rank, prefix_changes=snapshot))

    def _tell_prefixes(self, *, at_once: bool) -> None:
        changes = self._prefix_news.take(time.monotonic(), at_once=at_once)
        if changes is not None:
            frames = wire.encoder.encode(EngineCoreOutputs(self._rank, prefix_changes=changes))
            for client in list(self._prefix_news.followers):
                self._send_frames(client, frames)

    def _tell_posture(self) -> None:
        """Tell every client when the core drains, pauses, sleeps or wakes, whether or not it has
        requests here. It learns that before it learns what became of them."""
        posture = self._core.posture
        untold = [x for x in self._clients if self._told.get(x, AT_WORK) != posture]
        for client in untold:
            if posture == AT_WORK:
                del self._told[client]
            else:
                self._told[client] = posture
            self._send(client, EngineCoreOutputs(self._rank, scheduler_stats=self._core.stats()))

    def _stats_if_due(self, talking: bool) -> SchedulerStats | None:
        now = time.monotonic()
        if not talking or (now < self._stats_due and self._core.has_work):
            return None
        self._stats_due = now + STATS_INTERVAL_S
        return self._core.stats()

    def _send(self, client: bytes, message: EngineCoreOutputs) -> None:
        self._send_frames(client, wire.encoder.encode(message))

    def _send_frames(self, client: bytes, frames: list[Frame]) -> None:
        socket = self._sockets[client[0]]
        try:
            socket.send_multipart((client[1:], *frames), zmq.NOBLOCK)
        except zmq.ZMQError as exc:  # gone, or too far behind
            log.info("a client is unreachable: %s", exc)
            self._clients.pop(client, None)
            self._told.pop(client, None)
            self._prefix_news.forget(client)
            self._heartbeat.forget(client)
            self._core.client_lost(client)

    def _say_goodbye(self) -> None:
        last: list[list[Frame]] = [[wire.ENGINE_CORE_DEAD]]
        if self._last_words:
            last.insert(
                0, wire.encoder.encode(EngineCoreOutputs(self._rank, last_words=self._last_words))
            )
        farewell = Farewell(self._sockets)
        for client in self._clients:
            with contextlib.suppress(zmq.ZMQError):  # it is gone already
                for frames in last:
                    self._sockets[client[0]].send_multipart((client[1:], *frames), zmq.NOBLOCK)
                farewell.num_told += 1
        farewell.wait(SENTINEL_LINGER_MS / 1000)
        for socket in self._sockets:
            socket.close(linger=SENTINEL_LINGER_MS)
        for gate in self._gates:
            gate.close()
        self._core.close()
        self._context.term()


def _failure(call_id: int, method: str, error: BaseException) -> UtilityOutput:
    """What the caller learns. What was not raised on purpose is in the log, too."""
    if not isinstance(error, DiptychError):
        log.error("the utility call %s failed", method, exc_info=error)
    text = str(error) or type(error).__name__
    param = error.param if isinstance(error, InvalidRequestError) else None
    return UtilityOutput(call_id, failure_message=f"{method}: {text}", failure_param=param)
