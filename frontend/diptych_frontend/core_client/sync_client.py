"""A client of one EngineCore process with blocking calls, for programs without an event loop."""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from diptych_frontend.core_client.client import (
    UTILITY_TIMEOUT_S,
    MalformedAnswerError,
    NotConnectedError,
    open_dealer,
    receive_frames,
    send_frames,
)
from diptych_frontend.core_client.launcher import TERMINATE_GRACE_S, Core
from diptych_frontend.core_client.sent_images import SentImages
from diptych_protocol import (
    UNREADABLE,
    ClientClosedError,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineDeadError,
    EngineDescription,
    UtilityCall,
    UtilityError,
    UtilityOutput,
    wire,
)
from diptych_protocol.arrays import Frame
from diptych_protocol.as_sent import encode_call

LIFE_CHECK_MS = 200
"""How often the process is checked while nothing arrives."""
OUTPUT_WAIT_S = 1.0


class SyncCoreClient:
    """Owns the core's process, or has adopted it. One thread uses it."""

    def __init__(self, core: Core, start_timeout_s: float) -> None:
        """Wait until the core can serve.

        Raises `EngineDeadError` if it ends instead, `TimeoutError` if it takes too long.
        """
        self._core = core
        self._socket = open_dealer(core.endpoint, core.keys)
        self._messages: deque[EngineCoreOutputs] = deque()
        self._images = SentImages()
        self._answers: dict[int, UtilityOutput] = {}
        self._awaited: int | None = None
        """The utility call whose answer is waited for; others came too late."""
        self._call_ids = itertools.count()
        self._closed = False
        self._dead: EngineDeadError | None = None
        try:
            self._socket.connect(core.endpoint)
            self.description = self._greet(start_timeout_s)
            core.unlink()
        except BaseException:
            self.close()
            raise

    def _greet(self, timeout_s: float) -> EngineDescription:
        deadline = time.monotonic() + timeout_s
        while not self._socket.poll(LIFE_CHECK_MS, zmq.POLLOUT):
            self._check_life()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no engine core within {timeout_s:g} s")
        raw = self.call("describe", timeout_s=deadline - time.monotonic())
        try:
            return msgspec.convert(raw, EngineDescription)
        except msgspec.ValidationError as exc:
            raise MalformedAnswerError(f"describe: the answer is malformed: {exc}") from exc

    def add(self, request: EngineCoreRequest) -> None:
        if request.mm_features is not None:
            request = self._images.to_send(request)
        self._send(EngineCoreRequestType.ADD, wire.encoder.encode(request))

    def abort(self, request_ids: list[str]) -> None:
        if request_ids:
            self._images.ended(request_ids)
            self._send(EngineCoreRequestType.ABORT, wire.encoder.encode(request_ids))

    def get_output(self, wait_s: float = OUTPUT_WAIT_S) -> EngineCoreOutputs:
        """Return the core's next message, and wait for it at most `wait_s`. It is empty if there is
        none.

        Raises `EngineDeadError` when the core has ended.
        """
        deadline = time.monotonic() + wait_s
        while not self._messages and self._receive(deadline):
            pass
        return self._messages.popleft() if self._messages else EngineCoreOutputs()

    def call(self, method: str, *args: Any, timeout_s: float = UTILITY_TIMEOUT_S) -> Any:
        """A utility call.

        Raises:
            InvalidRequestError: the arguments cannot be sent.
            UtilityError: the core refused it or it failed there.
            EngineDeadError: the core ended before the answer.
            TimeoutError: no answer in time.
        """
        call_id = next(self._call_ids)
        payload = encode_call(UtilityCall(0, call_id, method, list(args)))
        self._send(EngineCoreRequestType.UTILITY, payload)
        deadline = time.monotonic() + timeout_s
        self._awaited = call_id
        while call_id not in self._answers:
            if not self._receive(deadline):
                raise TimeoutError(f"{method}: no answer within {timeout_s * 1000:.0f} ms")
        answer = self._answers.pop(call_id)
        if answer.failure_message is not None:
            raise UtilityError(answer.failure_message, param=answer.failure_param)
        return answer.result

    def close(self, timeout_s: float = TERMINATE_GRACE_S) -> None:
        """Disconnect, and end the process if it is ours. Safe to call twice."""
        self._closed = True
        self._socket.close(linger=0)
        self._core.stop(timeout_s)

    def _send(self, kind: EngineCoreRequestType, payload: list[Frame]) -> None:
        self._check_usable()
        try:
            send_frames(self._socket, (kind.value, *payload))
        except zmq.Again as exc:
            self._check_life()
            raise NotConnectedError(f"no engine core listens at {self._core.endpoint}") from exc

    def _receive(self, deadline: float) -> bool:
        """Take one message; False if none came before the deadline."""
        self._check_usable()
        while not self._socket.poll(LIFE_CHECK_MS if deadline > time.monotonic() else 0):
            self._check_life()
            if time.monotonic() >= deadline:
                return False
        heads, arrays = receive_frames(self._socket, 1)
        if heads[0] == wire.ENGINE_CORE_DEAD:
            self._socket.disconnect(self._core.endpoint)  # for which the core waits
            self._dead = EngineDeadError(f"the engine core at {self._core.endpoint} has ended")
            raise self._dead
        try:
            message = wire.outputs_decoder.decode([*heads, *arrays])
        except UNREADABLE as exc:
            # Whatever it was about would be waited for in vain.
            self._dead = EngineDeadError(
                f"the engine core at {self._core.endpoint} sent what cannot be read: {exc}"
            )
            raise self._dead from exc
        answer = message.utility_output
        if answer is None:
            if self._images.open:
                for request in self._images.to_send_again(message):
                    self.add(request)
            self._messages.append(message)
        elif answer.call_id == self._awaited:
            self._answers[answer.call_id] = answer
        return True

    def _check_usable(self) -> None:
        if self._closed:
            raise ClientClosedError("the engine was shut down")
        if self._dead is not None:
            raise self._dead

    def _check_life(self) -> None:
        cause = self._core.ended()
        if cause is not None and not self._socket.poll(0):  # what it said last is still to be read
            self._dead = cause
            raise cause
