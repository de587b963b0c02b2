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
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

import zmq

from diptych_engine.control.core import SHUTTING_DOWN, EngineCore
from diptych_engine.scheduling.request import Pending, StepPlan
from diptych_frontend.core_client.client import receive_frames
from diptych_frontend.core_client.core_socket import Farewell, bind_core_socket
from diptych_frontend.core_client.curve import CurveGate
from diptych_frontend.core_client.heartbeat_timer import (
    CALL_S,
    LONGEST_STEP_S,
    QUICK_CALLS,
    HeartbeatTimer,
)
from diptych_frontend.core_client.prefix_news import PrefixNews
from diptych_frontend.core_client.wire_server import AT_WORK, WireServer, check_pending, failure_of
from diptych_protocol import (
    CurveKeys,
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
    UtilityCall,
    UtilityOutput,
    wire,
)
from diptych_protocol.arrays import Frame
from diptych_protocol.wire import Heartbeat


class HeartbeatSender:
    """The loop of a core calls it in each turn, and before whatever may take long."""

    def __init__(
        self,
        core: EngineCore,
        timer: HeartbeatTimer,
        tell: Callable[[Heartbeat, SchedulerStats | None], None],
    ) -> None:
        """`tell`: sends a heartbeat to the followers, with statistics if there are any."""
        self._core, self._timer, self._tell = core, timer, tell
        core.before_step = self._before_step
        core.grammars.before_silence = partial(self._before_silence, LONGEST_STEP_S)

    def wait_s(self, now: float) -> float | None:
        """How long the loop may wait for messages; None: as long as it wants."""
        return self._timer.wait_s(now) if self._timer.followers else None

    def turned(self) -> None:
        """The loop has done what there was to do."""
        if self._timer.followers:
            heartbeat = self._timer.beat(time.monotonic())
            if heartbeat is not None:
                heartbeat.adapters = list(self._core.adapters.digests())
                self._tell(heartbeat, self._core.stats())

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        self._timer.steps.took(plan.num_tokens, seconds)

    def before_call(self, method: str) -> None:
        """A call is about to be carried out, in the loop."""
        if method not in QUICK_CALLS:
            self._before_silence(CALL_S, in_call=True)

    def _before_step(self, plan: StepPlan) -> None:
        adapters = self._core.adapters
        unusual = plan.images is not None or (adapters.in_use and adapters.lacks(plan.scheduled))
        bound_s = self._timer.steps.bound_s(plan.num_tokens)
        self._before_silence(LONGEST_STEP_S if unusual else bound_s)

    def _before_silence(self, seconds: float, *, in_call: bool = False) -> None:
        if self._timer.followers:
            heartbeat = self._timer.before_silence(time.monotonic(), seconds, in_call=in_call)
            if heartbeat is not None:
                self._tell(heartbeat, None)


log = logging.getLogger(__name__)

IDLE_WAIT_MS = 1000
SENTINEL_LINGER_MS = 2000
FEW_CLIENTS = 16
"""So many are never looked through for those that have vanished."""


class CoreServer(WireServer):
    """Serves one EngineCore on some ZMQ endpoints until told to stop."""

    _prefix_news: PrefixNews

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
        pool = core.scheduler.pool
        super().__init__(PrefixNews(pool, core.adapters.digests, pool.only_stored), rank)
        self._core = core
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
        self._look_through_at = FEW_CLIENTS
        """At more clients than these, each is tried."""
        self._pending: dict[tuple[bytes, int], Future[Any]] = {}
        """(client, call id) -> the answer that is to come."""
        self._answered: deque[tuple[bytes, UtilityOutput]] = deque()
        """Answers that came later, from whatever thread."""
        self._shutdown_timeout_s = shutdown_timeout_s
        self._stop_wanted = False
        self._end_by = math.inf
        """When the core ends at the latest, once that is wanted. Until then, messages are answered
        at once: requests with an abort, calls with an error."""
        self._last_words = ""
        """Why this core ends, if not because it was told to."""
        self._heartbeat = HeartbeatSender(core, self._timer, self._tell_heartbeat)

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
            self._core.failed = True
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
            self._end_by = now + self._shutdown_timeout_s
            self._reject_pending()
        return now >= self._end_by or not self._core.scheduler.can_finish_more

    def _turn(self) -> None:
        """Take what has arrived and run one step, if there is anything to compute."""
        core = self._core
        self._receive(0 if self._has_work() else self._idle_wait_ms())
        if self._has_work():
            begin = time.monotonic()
            if self._prefix_news.expected:
                self.tell_prefixes(at_once=True)
            plan, pending = self._start_step()
            self._receive(0)
            core.finish_step(plan, pending)
            self._heartbeat.stepped(plan, time.monotonic() - begin)
            if not plan.scheduled:
                # Everything waits for blocks that only the hinge or an abort can free.
                self._receive(self._idle_wait_ms())
        posture = core.posture
        if self._told or posture != AT_WORK:
            self._tell_posture(posture)
        self._send_outputs()
        if self._prefix_news.followers:
            self.tell_prefixes(at_once=not core.has_work)
        if core.kept.by_name:
            core.kept.forget_old()
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
            wait_ms = int(min(wait_ms, max(0.0, self._end_by - now) * 1000))
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
            self.take(client, frames, arrays)
            if len(self._clients) > self._look_through_at:
                self._forget_vanished()

    def _forget_vanished(self) -> None:
        """Drop clients that have gone without a word, which only an attempt to write to them tells.

        It happens each time that their number has doubled, so it costs a message for each new one.
        """
        nothing = wire.encoder.encode(EngineCoreOutputs())
        for client in list(self._clients):
            self._send_frames(client, nothing)
        self._look_through_at = max(FEW_CLIENTS, 2 * len(self._clients))

    def _answer_malformed(self, client: bytes, frames: list[bytes], error: Exception) -> None:
        self._core.malformed_messages += 1
        super()._answer_malformed(client, frames, error)

    def _unreadable(self, request_id: str, client: bytes, reason: str) -> None:
        self._core.unreadable(request_id, client, reason)

    def _abort(self, request_ids: list[str], client: bytes) -> None:
        self._core.abort(request_ids)

    def _add(self, request: EngineCoreRequest, client: bytes) -> None:
        self._core.add(request, client)
        news, scheduler = self._prefix_news, self._core.scheduler
        if news.tells_others and (names := scheduler.will_remember(request.request_id)):
            news.expect(names)

    def _call(self, client: bytes, call: UtilityCall) -> None:
        self._heartbeat.before_call(call.method)
        answer: UtilityOutput | None = None
        try:
            check_pending(len(self._pending))
            result = self._core.call(call.method, call.args, wire.utility_decoder.convert)
        except Exception as exc:  # it fails the call, not the engine
            result, answer = None, failure_of(call, exc)
        self._heartbeat.turned()  # before the answer: until then no router sends prompts here
        if isinstance(result, Future):
            self._pending[client, call.call_id] = result
            result.add_done_callback(partial(self._take_answer, client, call))
        else:
            self._send_answer(client, answer or UtilityOutput(call.call_id, result=result))

    def _take_answer(self, client: bytes, call: UtilityCall, done: Future[Any]) -> None:
        """A pending call has ended. May run in any thread."""
        try:
            answer = UtilityOutput(call.call_id, result=done.result())
        except (Exception, CancelledError) as exc:
            answer = failure_of(call, exc)
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
        core = self._core
        outputs, events = core.take_outputs(), core.scheduler.take_stations()
        self._send_made(outputs, events, idle=not core.has_work)

    def _send_answers(self) -> None:
        while self._answered:
            client, answer = self._answered.popleft()
            if self._pending.pop((client, answer.call_id), None) is not None:
                self._send_answer(client, answer)

    def _send_frames(self, client: bytes, frames: list[Frame]) -> None:
        socket = self._sockets[client[0]]
        try:
            socket.send_multipart((client[1:], *frames), zmq.NOBLOCK)
        except zmq.ZMQError as exc:  # gone, or too far behind
            log.info("a client is unreachable: %s", exc)
            self._forget(client)
            self._core.client_lost(client)

    def _stats(self) -> SchedulerStats:
        return self._core.stats()

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
