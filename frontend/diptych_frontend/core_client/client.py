"""A client of one EngineCore: one DEALER socket, and reports when the core comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from diptych_frontend.core_client.curve import use_keys
from diptych_frontend.core_client.sent_images import SentImages
from diptych_protocol import (
    UNREADABLE,
    ClientClosedError,
    CurveKeys,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineDeadError,
    EngineDescription,
    SchedulerStats,
    UtilityCall,
    UtilityError,
    UtilityOutput,
    wire,
)
from diptych_protocol.arrays import Frame
from diptych_protocol.as_sent import encode_call

log = logging.getLogger(__name__)

T = TypeVar("T")

SUCCESSOR_S = 0.5
"""After a core has ended, its address is not used for this long."""
UTILITY_TIMEOUT_S = 60.0
CONNECT_POLL_S = 0.5
"""Beside ZMQ's own news of connections, which may have come just before somebody waits for it."""
RECONNECT_MS, MOST_RECONNECT_MS, LOCAL_RECONNECT_MS = 50, 100, 10
"""ZMQ's waits between attempts to connect, at first and at most: somebody may wait for the core
that starts there. On this machine an attempt costs next to nothing."""
CONNECT_TIMEOUT_MS = 3000
HANDSHAKE_TIMEOUT_MS = 3000
PATIENCE_S = 6.0
HEARTBEATS = 4
"""A peer that misses this many heartbeats in a row counts as lost."""

# As plain integers: arithmetic with members of an enum takes longer than the calls.
NOBLOCK = int(zmq.NOBLOCK)
MORE = NOBLOCK | int(zmq.SNDMORE)
POLLIN = int(zmq.POLLIN)
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class NotConnectedError(EngineDeadError):
    """Nobody listens at the endpoint now."""


class HandshakeFailedError(EngineDeadError):
    """A process listens at the endpoint, but our key opens no connection to it."""


class MalformedAnswerError(UtilityError, ValueError):
    """The core's answer has the wrong form: it has another version, or is no core."""


def receive_frames(socket: zmq.Socket[bytes], head: int) -> tuple[list[bytes], list[Frame]]:
    """Return the next message: its first `head` frames as bytes, which is quicker for small ones,
    and the others, which are arrays, as views of ZMQ's own memory.

    Raises `zmq.Again` if there is none.
    """
    heads = [socket.recv(NOBLOCK)]
    arrays: list[Frame] = []
    while socket.getsockopt(zmq.RCVMORE):
        if len(heads) < head:
            heads.append(socket.recv(NOBLOCK))
        else:
            arrays.append(socket.recv(NOBLOCK, copy=False).buffer)
    return heads, arrays


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    """Send a message. Raises `zmq.Again` if no peer can take it."""
    for frame in frames[:-1]:
        socket.send(frame, MORE)
    socket.send(frames[-1], NOBLOCK)


def open_dealer(
    endpoint: str, keys: CurveKeys | None, patience_s: float = PATIENCE_S
) -> zmq.Socket[bytes]:
    """Return a socket for one core, not connected yet; see `CoreClient` for the parameters."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    set_dealer_options(socket, keys)
    if endpoint.startswith("ipc://"):
        socket.setsockopt(zmq.RECONNECT_IVL, LOCAL_RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 0)  # each time the same
    ask_for_signs_of_life(socket, endpoint, patience_s)
    return socket


def ask_for_signs_of_life(
    socket: zmq.Socket[bytes], endpoint: str, patience_s: float = PATIENCE_S
) -> None:
    """Make ZMQ's threads treat a peer as lost after this long without a sign of life, if there may
    be a network between. If both are on this machine, the system reports an end, and a process that
    was only paused has lost nothing."""
    if not endpoint.startswith("ipc://"):
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(patience_s * 1000 / HEARTBEATS))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(patience_s * 1000))


def set_dealer_options(socket: zmq.Socket[Any], keys: CurveKeys | None) -> None:
    """Configure a new DEALER socket for an engine core."""
    socket.setsockopt(zmq.LINGER, 0)
    # Nothing waits for a connection: a message is for the core that listens now, or for none.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the admission limit above us
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, MOST_RECONNECT_MS)
    if keys is not None:
        use_keys(socket, keys)


class CoreClient:
    """Talks to the core at one endpoint. Create it inside a running event loop.

    `on_outputs` gets every message of a step. `on_lost` is called once per connection that ends,
    with the reason: all requests on it are lost. ZMQ reconnects by itself; call `describe` again to
    learn which core answers then.
    """

    def __init__(
        self,
        endpoint: str,
        keys: CurveKeys | None,
        *,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_lost: Callable[[EngineDeadError], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Connect in the background.

        `patience_s`: how long a connected core on another machine may give no sign of life, not
        even a heartbeat of its ZMQ, which does not depend on how busy the core is.
        """
        self.endpoint = endpoint
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self._images = SentImages()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._closed = False
        self._last_words = ""
        self._connected = False
        self._handshake_failed = False
        """The newest attempt to connect ended in the handshake."""
        self._handshake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._socket = open_dealer(endpoint, keys, patience_s)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILURES
        )
        self._socket.connect(endpoint)
        # zmq.asyncio would cost a future for each message; its descriptors are all we need of it.
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._loop.add_reader(self._monitor.fileno(), self._drain_monitor)
        # A descriptor announces nothing before its socket was once found empty.
        self._loop.call_soon(self._drain)
        self._loop.call_soon(self._drain_monitor)

    async def describe(self, timeout_s: float = UTILITY_TIMEOUT_S) -> EngineDescription:
        """Greet the core and return its description. Waits until it is up, at most `timeout_s`.

        Raises what `ask` raises, and `HandshakeFailedError` as soon as a connection ends before it
        has begun, so that the caller can try another key.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return await self.ask("describe", EngineDescription, timeout_s=timeout_s)
                    except NotConnectedError as exc:
                        if self._handshake_failed:
                            message = f"{self.endpoint} hangs, or has another key: no handshake"
                            raise HandshakeFailedError(message) from exc
                        self._handshake.clear()
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(CONNECT_POLL_S):
                                await self._handshake.wait()
                        self._drain()  # lets ZMQ see its new pipe, as sending may not
        except TimeoutError as exc:
            message = f"no engine core answers at {self.endpoint} within {timeout_s:g} s"
            raise TimeoutError(message) from exc

    async def fetch_stats(self, timeout_s: float = UTILITY_TIMEOUT_S) -> SchedulerStats:
        """Return the core's present statistics. Raises what `ask` raises."""
        return await self.ask("stats", SchedulerStats, timeout_s=timeout_s)

    def add(self, request: EngineCoreRequest) -> None:
        if request.mm_features is not None:
            request = self._images.to_send(request)
        self.send((EngineCoreRequestType.ADD.value, *wire.encoder.encode(request)))

    def abort(self, request_ids: list[str]) -> None:
        if request_ids:
            self._images.ended(request_ids)
            self.send((EngineCoreRequestType.ABORT.value, *wire.encoder.encode(request_ids)))

    def start_wave(self, wave: int, exclude: int) -> None:
        """Let the core make steps together with the others, unless its rank is `exclude`."""
        payload = wire.encoder.encode((wave, exclude))
        self.send((EngineCoreRequestType.START_DP_WAVE.value, *payload))

    async def call(self, method: str, *args: Any, timeout_s: float = UTILITY_TIMEOUT_S) -> Any:
        """A utility call.

        Raises:
            InvalidRequestError: the arguments cannot be sent.
            NotConnectedError: nobody listens there now.
            UtilityError: the core refused it or it failed there.
            EngineDeadError: the connection ended before the answer.
            TimeoutError: no answer in time.
        """
        call_id = next(self._call_ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            payload = encode_call(UtilityCall(0, call_id, method, list(args)))
            self.send((EngineCoreRequestType.UTILITY.value, *payload))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as exc:
            raise TimeoutError(f"{method}: no answer within {timeout_s:g} s") from exc
        finally:
            del self._calls[call_id]

    def tell(self, method: str, *args: Any) -> None:
        """Make a utility call without an answer. It is sent before everything that is sent later.

        Raises `NotConnectedError` if nobody listens there now.
        """
        call = UtilityCall(0, ~next(self._call_ids), method, list(args))
        self.send((EngineCoreRequestType.UTILITY.value, *encode_call(call)))

    async def ask(
        self, method: str, wanted: type[T], *args: Any, timeout_s: float = UTILITY_TIMEOUT_S
    ) -> T:
        """Make a utility call with an answer of a known type.

        Raises what `call` raises, and `MalformedAnswerError` for an answer of another type.
        """
        answer = await self.call(method, *args, timeout_s=timeout_s)
        try:
            return msgspec.convert(answer, wanted)
        except msgspec.ValidationError as exc:
            raise MalformedAnswerError(f"{method}: the answer is malformed: {exc}") from exc

    def take_outputs(self, timeout_s: float) -> None:
        """Handle what has arrived, and wait for the first message at most `timeout_s`. This is for
        callers that block the running event loop."""
        self._socket.poll(int(timeout_s * 1000))
        self._drain()

    def close(self) -> None:
        """Disconnect. Pending calls fail. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._fail_calls(ClientClosedError(f"the client of {self.endpoint} was closed"))

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a whole message, which begins with the byte of its type. Raises `NotConnectedError`
        if nobody listens there now."""
        if self._closed:
            raise ClientClosedError(f"the client of {self.endpoint} was closed")
        try:
            if not self._connected:  # ZMQ may not have given up the pipe of what was lost yet
                raise zmq.Again
            send_frames(self._socket, frames)
        except zmq.Again as exc:
            raise NotConnectedError(f"no engine core listens at {self.endpoint}") from exc
        if int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN:
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Take every message that is here.

        The descriptor is edge-triggered, and sending may swallow an edge; so each send
        looks again.
        """
        while not self._closed and int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN:
            [message], arrays = receive_frames(self._socket, head=1)
            frames: list[Frame] = [message, *arrays]
            if frames[0] == wire.ENGINE_CORE_DEAD:
                why = f": {self._last_words}" if self._last_words else ""
                self._leave()
                self.lost(EngineDeadError(f"the engine core at {self.endpoint} has ended{why}"))
                continue
            try:
                outputs = wire.outputs_decoder.decode(frames)
            except UNREADABLE as exc:
                self._reconnect(f"it sent a message that cannot be read: {exc}")
                continue
            if outputs.last_words is not None:
                self._last_words = outputs.last_words
                continue
            self._last_words = ""  # of an earlier life: a core that has said them says nothing else
            if outputs.utility_output is not None:
                self._answer(outputs.utility_output)
            else:
                if self._images.open:
                    for request in self._images.to_send_again(outputs):
                        self.add(request)
                self._on_outputs(outputs)

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as its end has been noticed."""
        return self._connected

    def _reconnect(self, why: str) -> None:
        """Whatever that message was about waits for it: all on this connection is lost, here and,
        because its peer vanishes, in the core."""
        log.error("the core at %s is cut off: %s", self.endpoint, why)
        self._socket.disconnect(self.endpoint)
        self._socket.connect(self.endpoint)
        self._connected = False
        self.lost(EngineDeadError(f"the core at {self.endpoint} is cut off: {why}"))

    def _leave(self) -> None:
        """End the connection to a core that ends: it waits for that. Its successor at the same
        address is looked for a little later."""
        self._socket.disconnect(self.endpoint)
        self._connected = False
        self._loop.call_later(SUCCESSOR_S, self._connect_again)

    def _connect_again(self) -> None:
        if not self._closed:
            self._socket.connect(self.endpoint)

    def hear_last_words(self) -> str:
        """Return the core's reason for its end, even if the message is only now arriving; empty
        without one."""
        self._drain()
        return self._last_words

    def _answer(self, answer: UtilityOutput) -> None:
        future = self._calls.get(answer.call_id)
        if future is None or future.done():  # nobody waits any more, or did at all
            if answer.failure_message is not None:
                log.debug("%s: unread failure: %s", self.endpoint, answer.failure_message)
            return
        if answer.failure_message is not None:
            future.set_exception(UtilityError(answer.failure_message, param=answer.failure_param))
        else:
            future.set_result(answer.result)

    def _drain_monitor(self) -> None:
        """Connections begin and end, or fail to begin."""
        while not self._closed:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event = parse_monitor_message(frames)["event"]
            if event != zmq.EVENT_DISCONNECTED:
                self._handshake.set()
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected, self._handshake_failed = True, False
                self._drain()  # lets ZMQ see its new pipe and give up the old, as sending may not
            elif event & HANDSHAKE_FAILURES:
                self._handshake_failed = True
            elif self._connected:  # what never was cannot be lost
                self._connected = False
                words = self.hear_last_words()  # said before the end, and maybe not read yet
                why = f": {words}" if words else ""
                reason = f"the connection to the core at {self.endpoint} was lost{why}"
                self.lost(EngineDeadError(reason))

    def lost(self, cause: EngineDeadError) -> None:
        """Fail everything that waits on this connection."""
        self._images.forget()
        self._fail_calls(cause)
        self._on_lost(cause)

    def _fail_calls(self, error: Exception) -> None:
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(error)
