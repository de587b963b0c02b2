"""Answers what the clients of a vLLM server say, message by message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec

from diptych_protocol import (
    UNREADABLE,
    DiptychError,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineDescription,
    FinishReason,
    InvalidRequestError,
    UtilityOutput,
    wire,
)
from diptych_protocol.arrays import Frame
from diptych_protocol.salvage import call_id_of, request_id_of
from diptych_protocol.wire import ErrorKind
from diptych_vllm.serve.load import VllmLoad
from diptych_vllm.serve.outputs import VllmOutput, failure, output_of
from diptych_vllm.serve.requests import LENDS, check_request, passes_token_on, transfer_of

log = logging.getLogger(__name__)

STATS_INTERVAL_S: Final = 0.25
MAX_PENDING_CALLS: Final = 256
"""Utility calls that may wait for their answers at the same time."""


class ServedEngine(Protocol):
    """vLLM, as far as the service needs it."""

    description: EngineDescription
    connector: str
    load: VllmLoad

    @property
    def is_dead(self) -> bool:
        """Its core has ended."""

    def generate(self, request: EngineCoreRequest) -> AsyncIterator[VllmOutput]:
        """Run a request. To close the iterator is to abort it."""

    def error_of(self, error: Exception) -> tuple[ErrorKind, str | None]:
        """What an exception means, and the field that it names."""

    def has_died(self, error: Exception) -> bool:
        """Whether an exception says that the core has ended."""


Send = Callable[[bytes, list[Frame]], bool]
"""Sends frames to a client; False: it is gone."""


class WireService:
    """Serves one engine to all clients of a port."""

    def __init__(self, engine: ServedEngine, send: Send, on_death: Callable[[], None]) -> None:
        """on_death: called when the engine's core has ended."""
        self._engine = engine
        self._send_frames = send
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._clients: dict[bytes, int] = {}
        """Who has sent something -> how many requests."""
        self._open: dict[tuple[bytes, str], asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._outputs: dict[bytes, list[EngineCoreOutput]] = {}
        """What is to be sent at the end of this turn of the loop."""
        self._stats_due = 0.0
        self.methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "describe": self._describe,
            "stats": self._stats,
        }

    @property
    def clients(self) -> list[bytes]:
        """All that have spoken and are not known to be gone."""
        return list(self._clients)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def take(self, client: bytes, frames: list[bytes], arrays: list[Frame]) -> None:
        """A message has come."""
        self._clients.setdefault(client, 0)
        try:
            self._handle(client, frames, arrays)
        except (ValueError, *UNREADABLE) as exc:
            self._answer_malformed(client, frames, exc)

    def abort_all(self) -> None:
        """End all requests, and tell their clients so."""
        for (client, request_id), task in list(self._open.items()):
            task.cancel()
            self._put(
                client, EngineCoreOutput(request_id, [], finish_reason=wire.FinishReason.ABORT)
            )
        self._open.clear()
        self._flush()

    # --- messages -----------------------------------------------------------------------------

    def _handle(self, client: bytes, frames: list[bytes], arrays: list[Frame]) -> None:
        if len(frames) < 2:
            raise ValueError("a message without a payload")
        kind, message = frames
        payload: list[Frame] = [message, *arrays]
        match EngineCoreRequestType(kind):
            case EngineCoreRequestType.ADD:
                self._clients[client] += 1
                self._add(client, wire.request_decoder.decode(payload))
            case EngineCoreRequestType.ABORT:
                for request_id in wire.abort_decoder.decode(payload):
                    self._abort(client, request_id)
            case EngineCoreRequestType.UTILITY:
                self._call(client, payload)
            case other:
                raise ValueError(f"{other.name} is not accepted from a socket")

    def _answer_malformed(self, client: bytes, frames: list[bytes], error: Exception) -> None:
        """Who waits for the answer to a message that cannot be read gets an error, if the message
        says so much."""
        self._engine.load.stats.malformed_messages += 1
        kind, message, *_ = (*frames, b"", b"")
        reason = f"the message cannot be read: {error}"
        if kind == EngineCoreRequestType.ADD.value and (name := request_id_of(message)) is not None:
            self._put(client, failure(name, reason))
        elif (
            kind == EngineCoreRequestType.UTILITY.value
            and (call_id := call_id_of(message)) is not None
        ):
            self._answer(client, UtilityOutput(call_id, failure_message=reason))
        else:
            log.warning("a client sent a malformed message, dropped: %s", error)

    # --- requests -----------------------------------------------------------------------------

    def _add(self, client: bytes, request: EngineCoreRequest) -> None:
        key = client, request.request_id
        if key in self._open:
            self._put(client, failure(request.request_id, "a request with this id is here already"))
            return
        task = self._loop.create_task(self._serve(client, request))
        self._open[key] = task
        task.add_done_callback(lambda ended: self._forget(key, ended))

    def _forget(self, key: tuple[bytes, str], ended: asyncio.Task[None]) -> None:
        if self._open.get(key) is ended:
            del self._open[key]
        if not ended.cancelled() and (error := ended.exception()) is not None:
            log.error("request %s was not served", key[1], exc_info=error)

    def _abort(self, client: bytes, request_id: str) -> None:
        task = self._open.pop((client, request_id), None)
        if task is not None:
            task.cancel()

    async def _serve(self, client: bytes, request: EngineCoreRequest) -> None:
        """Run a request to its end. Cancelled, it is aborted, and says nothing more."""
        name = request.request_id
        try:
            check_request(request)
            params = request.sampling
            asked = transfer_of(request) or {}
            drops = bool(asked.get(LENDS)) and not passes_token_on(params, self._engine.connector)
            async for news in self._engine.generate(request):
                output = output_of(name, news, params.logprobs, params.prompt_logprobs)
                if drops and output.finish_reason is FinishReason.LENGTH:
                    output.new_token_ids, output.new_logprobs = [], None
                self._put(client, output)
                if output.finished:
                    return
        except Exception as exc:
            if self._engine.has_died(exc):
                self._on_death()
                return
            kind, param = self._engine.error_of(exc)
            if kind is ErrorKind.FAULT:
                log.exception("request %s failed", name)
            self._put(client, failure(name, f"vLLM: {exc}", kind, param))

    # --- calls --------------------------------------------------------------------------------

    def _call(self, client: bytes, payload: list[Frame]) -> None:
        call = wire.utility_decoder.decode(payload)
        if len(self._calls) >= MAX_PENDING_CALLS:
            why = "too many calls wait for their answers already"
            self._answer(client, UtilityOutput(call.call_id, failure_message=why))
            return
        task = self._loop.create_task(self._run_call(client, call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _run_call(self, client: bytes, call: wire.UtilityCall) -> None:
        try:
            method = self.methods.get(call.method)
            if method is None:
                known = ", ".join(sorted(self.methods))
                raise InvalidRequestError(f"vLLM does not offer this call; there are {known}")
            answer = UtilityOutput(call.call_id, result=await method(*call.args))
        except Exception as exc:  # it fails the call, not the engine
            if not isinstance(exc, DiptychError):
                log.exception("the utility call %s failed", call.method)
            text = f"{call.method}: {str(exc) or type(exc).__name__}"
            param = exc.param if isinstance(exc, InvalidRequestError) else None
            answer = UtilityOutput(call.call_id, failure_message=text, failure_param=param)
        self._answer(client, answer)

    async def _describe(self) -> Any:
        return msgspec.to_builtins(self._engine.description)

    async def _stats(self) -> Any:
        return self._engine.load.stats

    # --- sending ------------------------------------------------------------------------------

    def _put(self, client: bytes, output: EngineCoreOutput) -> None:
        """Send an output with all others of this turn of the loop."""
        if not self._outputs:
            self._loop.call_soon(self._flush)
        self._outputs.setdefault(client, []).append(output)

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, {}
        now = self._loop.time()
        stats = None
        if outputs and (now >= self._stats_due or not self._open):
            self._stats_due = now + STATS_INTERVAL_S
            stats = self._engine.load.stats
        for client, made in outputs.items():
            message = EngineCoreOutputs(outputs=made, scheduler_stats=stats)
            message.finished_requests = {x.request_id for x in made if x.finished} or None
            if stats is not None:
                message.requests_received = self._clients.get(client, 0)
            self._send(client, message)

    def _answer(self, client: bytes, answer: UtilityOutput) -> None:
        if answer.call_id < 0:  # nobody waits for it
            if answer.failure_message is not None:
                log.info("a call without an answer: %s", answer.failure_message)
            return
        self._send(client, EngineCoreOutputs(utility_output=answer))

    def _send(self, client: bytes, message: EngineCoreOutputs) -> None:
        if not self._send_frames(client, wire.encoder.encode(message)):
            self._lose(client)

    def _lose(self, client: bytes) -> None:
        """A client is gone, and with it all that it wanted."""
        self._clients.pop(client, None)
        for key in [key for key in self._open if key[0] == client]:
            self._abort(*key)
