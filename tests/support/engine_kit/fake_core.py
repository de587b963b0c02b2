"""What speaks an EngineCore's side of the wire and does what a test tells it to.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio
from waits import PATIENCE_S

from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineDescription,
    FinishReason,
    SchedulerStats,
    UtilityOutput,
    wire,
)

SILENCE: Final = object()
"""An answer that never comes."""


def description(model: str) -> EngineDescription:
    return EngineDescription(
        engine_id="fake", epoch="1", model=model, max_model_len=1000, vocab_size=64, block_size=16,
        num_blocks=64, dtype="float32", compat={}, max_num_seqs=8, pid=0,
    )  # fmt: skip


class FakeCore:
    """Answers utility calls with what `answers` has for their names: a value, an exception, or
    `SILENCE`. Belongs to a running event loop."""

    def __init__(self, endpoint: str, **answers: Any) -> None:
        self.answers = {
            "describe": msgspec.to_builtins(description("fake")),
            "stats": SchedulerStats(),
            **answers,
        }
        self.heard: list[tuple[bytes, EngineCoreRequestType, Any]] = []
        """Who said what, decoded."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(endpoint)
        self._task = asyncio.create_task(self._serve())

    def calls(self, method: str) -> int:
        return sum(kind is EngineCoreRequestType.UTILITY and what.method == method
                   for _, kind, what in self.heard)  # fmt: skip

    async def added(self, count: int) -> list[EngineCoreRequest]:
        """Wait for so many requests."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                added = [w for _, kind, w in self.heard if kind is EngineCoreRequestType.ADD]
                if len(added) >= count:
                    return added
                await asyncio.sleep(0.005)

    async def aborted(self) -> list[str]:
        """Wait for an abort; all ids that were aborted so far."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                ids = [i for _, kind, w in self.heard if kind is EngineCoreRequestType.ABORT
                       for i in w]  # fmt: skip
                if ids:
                    return ids
                await asyncio.sleep(0.005)

    async def tell(self, *outputs: EngineCoreOutput) -> None:
        """Send a step's outputs to the client that sent the newest request."""
        await self.send(*wire.encoder.encode(EngineCoreOutputs(outputs=list(outputs))))

    async def send(self, *frames: Any) -> None:
        """To the client that sent the newest request, or else that spoke last."""
        added = [who for who, kind, _ in self.heard if kind is EngineCoreRequestType.ADD]
        await self._socket.send_multipart([(added or [self.heard[-1][0]])[-1], *frames])

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)

    async def _serve(self) -> None:
        while True:
            client, kind_byte, *payload = await self._socket.recv_multipart()
            kind = EngineCoreRequestType(kind_byte)
            match kind:
                case EngineCoreRequestType.ADD:
                    self.heard.append((client, kind, wire.request_decoder.decode(payload)))
                case EngineCoreRequestType.ABORT:
                    self.heard.append((client, kind, wire.abort_decoder.decode(payload)))
                case EngineCoreRequestType.UTILITY:
                    call = wire.utility_decoder.decode(payload)
                    self.heard.append((client, kind, call))
                    if call.call_id >= 0:
                        await self._answer(client, call.call_id, self.answers[call.method])

    async def _answer(self, client: bytes, call_id: int, answer: Any) -> None:
        if answer is SILENCE or call_id < 0:
            return
        if isinstance(answer, Exception):
            output = UtilityOutput(call_id, failure_message=str(answer))
        else:
            output = UtilityOutput(call_id, result=answer)
        frames = wire.encoder.encode(EngineCoreOutputs(utility_output=output))
        await self._socket.send_multipart([client, *frames])


def said(request: EngineCoreRequest, *token_ids: int, ends: bool = False) -> EngineCoreOutput:
    """An output of a request."""
    reason = FinishReason.LENGTH if ends else None
    return EngineCoreOutput(request.request_id, list(token_ids), finish_reason=reason)


def failed(request: EngineCoreRequest, error: str) -> EngineCoreOutput:
    return EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=error)
