"""The engine's end of the wire: reads the messages of clients, and tells them of the engine."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

from diptych_frontend.core_client.heartbeat_timer import HeartbeatTimer
from diptych_frontend.core_client.prefix_news import PrefixNews
from diptych_protocol import (
    UNREADABLE,
    DiptychError,
    EngineCoreOutput,
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
from diptych_protocol.outputs import RequestJourneyEvent
from diptych_protocol.salvage import asker_of
from diptych_protocol.wire import Heartbeat

log = logging.getLogger(__name__)

STATS_INTERVAL_S: Final = 0.25
MAX_PENDING_CALLS: Final = 256
"""Utility calls that may wait for their answers at the same time."""

Posture = tuple[bool, bool, int]
"""Whether an engine drains, whether it is paused, and its level of sleep."""
AT_WORK: Final[Posture] = (False, False, 0)


class WireServer(ABC):
    """Serves one core, of whichever engine, to its clients."""

    def __init__(self, prefix_news: PrefixNews | None, rank: int = 0) -> None:
        """
        Args:
            prefix_news: None if nobody knows which blocks the core remembers.
            rank: the core's place among those of its engine.
        """
        self._rank = rank
        self._clients: dict[bytes, int] = {}
        """Client -> requests that it has sent. Those that are known to be gone are not here."""
        self._told: dict[bytes, Posture] = {}
        """Client -> the posture of the core that it was told last, unless that is `AT_WORK`."""
        self._prefix_news = prefix_news
        self._timer = HeartbeatTimer()
        self._stats_due = 0.0

    # --- what each engine does in its own way -------------------------------------------------

    @abstractmethod
    def _send_frames(self, client: bytes, frames: list[Frame]) -> None:
        """Send a message. A client that cannot be reached is forgotten."""

    @abstractmethod
    def _add(self, request: EngineCoreRequest, client: bytes) -> None:
        """Begin with a request."""

    @abstractmethod
    def _abort(self, request_ids: list[str], client: bytes) -> None:
        """End requests that the client wants no more of."""

    @abstractmethod
    def _call(self, client: bytes, call: UtilityCall) -> None:
        """Carry out a utility call, and answer it."""

    @abstractmethod
    def _unreadable(self, request_id: str, client: bytes, reason: str) -> None:
        """Fail a request of which only the id can be read."""

    @abstractmethod
    def _stats(self) -> SchedulerStats:
        """Return the core's present statistics."""

    # --- receiving ----------------------------------------------------------------------------

    def take(self, client: bytes, frames: list[bytes], arrays: list[Frame]) -> None:
        """Process a message of a client."""
        self._clients.setdefault(client, 0)
        try:
            self._handle(client, frames, arrays)
        except (ValueError, *UNREADABLE) as exc:
            self._answer_malformed(client, frames, exc)

    def _handle(self, client: bytes, frames: list[bytes], arrays: list[Frame]) -> None:
        if len(frames) < 2:
            raise ValueError("a message without a payload")
        kind, message = frames
        payload: list[Frame] = [message, *arrays]
        match EngineCoreRequestType(kind):
            case EngineCoreRequestType.ADD:
                self._clients[client] += 1
                self._add(wire.request_decoder.decode(payload), client)
            case EngineCoreRequestType.ABORT:
                self._abort(wire.abort_decoder.decode(payload), client)
            case EngineCoreRequestType.UTILITY:
                call = wire.utility_decoder.decode(payload)
                if call.method == wire.FOLLOW_PREFIXES:
                    self._follow_prefixes(client)
                elif call.method == wire.FOLLOW_HEARTBEAT:
                    if not self._timer.follow(client, *call.args[:2]):
                        log.warning("a client may not hear the heartbeat: too many do")
                else:
                    self._call(client, call)
            case other:
                raise ValueError(f"{other.name} is not accepted from a socket")

    def _answer_malformed(self, client: bytes, frames: list[bytes], error: Exception) -> None:
        """Send an error to whoever waits for the answer to an unreadable message, if known."""
        reason = f"the message cannot be read: {error}"
        request_id, call_id = asker_of(frames)
        if request_id is not None:
            self._unreadable(request_id, client, reason)
        elif call_id is not None:
            self._send_answer(client, UtilityOutput(call_id, failure_message=reason))
        else:
            log.warning("a client sent a malformed message, dropped: %s", error)

    # --- sending ------------------------------------------------------------------------------

    def _send(self, client: bytes, message: EngineCoreOutputs) -> None:
        self._send_frames(client, wire.encoder.encode(message))

    def _send_made(
        self,
        outputs: Mapping[bytes, list[EngineCoreOutput]],
        events: Mapping[bytes, list[RequestJourneyEvent]],
        *,
        idle: bool,
    ) -> None:
        """Send every client its share of what was made, with statistics now and then, and at the
        end of all work."""
        stats, now = None, time.monotonic()
        if outputs and (idle or now >= self._stats_due):
            self._stats_due = now + STATS_INTERVAL_S
            stats = self._stats()
        for client in outputs.keys() | events.keys():
            made = outputs.get(client, [])
            message = EngineCoreOutputs(self._rank, made, stats, journey_events=events.get(client))
            message.finished_requests = {x.request_id for x in made if x.finished} or None
            if stats is not None:
                message.requests_received = self._num_received(client)
            self._send_frames(client, wire.encoder.encode(message))

    def _num_received(self, client: bytes) -> int:
        return self._clients.get(client, 0)

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

    def _forget(self, client: bytes) -> None:
        """Forget a client that is gone."""
        self._clients.pop(client, None)
        self._told.pop(client, None)
        self._timer.forget(client)
        if self._prefix_news is not None:
            self._prefix_news.forget(client)

    # --- news ---------------------------------------------------------------------------------

    def _follow_prefixes(self, client: bytes) -> None:
        if self._prefix_news is None:
            return
        self.tell_prefixes(at_once=True)
        snapshot = self._prefix_news.follow(client)
        if snapshot is None:
            log.warning("a client may not follow the prefixes: too many do")
        else:
            self._send(client, EngineCoreOutputs(self._rank, prefix_changes=snapshot))

    def tell_prefixes(self, *, at_once: bool = False) -> None:
        """Report the changes of remembered prefixes to the clients that follow them."""
        if self._prefix_news is None:
            return
        changes = self._prefix_news.take(time.monotonic(), at_once=at_once)
        if changes is not None:
            frames = wire.encoder.encode(EngineCoreOutputs(self._rank, prefix_changes=changes))
            for client in list(self._prefix_news.followers):
                self._send_frames(client, frames)

    def _tell_posture(self, posture: Posture) -> None:
        """Tell every client when the core drains, pauses, sleeps or wakes, whether or not it has
        requests here. It learns that before it learns what became of them."""
        for client in [x for x in self._clients if self._told.get(x, AT_WORK) != posture]:
            if posture == AT_WORK:
                del self._told[client]
            else:
                self._told[client] = posture
            self._send(client, EngineCoreOutputs(self._rank, scheduler_stats=self._stats()))

    def _tell_heartbeat(self, heartbeat: Heartbeat, stats: SchedulerStats | None) -> None:
        """Send a heartbeat to its followers. Without statistics, they are told of no requests."""
        message = EngineCoreOutputs(self._rank, scheduler_stats=stats, heartbeat=heartbeat)
        num_received = self._num_received if stats is not None else lambda _client: 0
        for client, message.requests_received in self._timer.addressed(heartbeat, num_received):
            self._send(client, message)


def failure_of(call: UtilityCall, error: BaseException) -> UtilityOutput:
    """Return the answer to a call that failed. What was not raised on purpose is logged, too."""
    if not isinstance(error, DiptychError):
        log.error("the utility call %s failed", call.method, exc_info=error)
    text = f"{call.method}: {str(error) or type(error).__name__}"
    param = error.param if isinstance(error, InvalidRequestError) else None
    return UtilityOutput(call.call_id, failure_message=text, failure_param=param)


def check_pending(num_pending: int) -> None:
    """Raise `DiptychError` if so many calls wait for their answers that no other may."""
    if num_pending >= MAX_PENDING_CALLS:
        raise DiptychError("too many calls wait for their answers already")
