"""The router's own requests at one engine, such as canaries."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from diptych_protocol import (
    EngineCoreOutput,
    EngineDeadError,
    EngineGenerateError,
    FinishReason,
)


@dataclass(frozen=True, slots=True)
class _OwnRequest:
    """What a request of the router itself has brought so far."""

    outputs: list[EngineCoreOutput]
    ended: asyncio.Future[list[EngineCoreOutput]]


class OwnRequests:
    """The router's open requests. Their outputs go to nobody else."""

    def __init__(self) -> None:
        self.by_id: dict[str, _OwnRequest] = {}

    def expect(self, request_id: str) -> asyncio.Future[list[EngineCoreOutput]]:
        """Record that a request is being sent. Returns a future for its outputs.

        It raises `EngineGenerateError` if the request failed, `EngineDeadError` if the engine is
        lost. A caller that stops awaiting it calls `forget`.
        """
        ended = asyncio.get_running_loop().create_future()
        self.by_id[request_id] = _OwnRequest([], ended)
        return ended

    def forget(self, request_id: str) -> None:
        del self.by_id[request_id]

    def take(self, output: EngineCoreOutput) -> bool:
        """Take an output if it belongs to one of these requests; False if it does not."""
        own = self.by_id.get(output.request_id)
        if own is None:
            return False
        own.outputs.append(output)
        if output.finished and not own.ended.done():
            if output.finish_reason is FinishReason.ERROR:
                own.ended.set_exception(EngineGenerateError(output.error or "no reason given"))
            else:
                own.ended.set_result(own.outputs)
        return True

    def lose(self, cause: EngineDeadError) -> None:
        """Fail all of them, because the engine is gone."""
        for own in self.by_id.values():
            if not own.ended.done():
                own.ended.set_exception(EngineDeadError(str(cause)))
