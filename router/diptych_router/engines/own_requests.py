"""The router's own requests at one engine, such as canaries."""

from __future__ import annotations

import asyncio

from diptych_protocol import EngineCoreOutput, EngineDeadError, EngineGenerateError, FinishReason

Ended = asyncio.Future[list[EngineCoreOutput]]


class OwnRequests:
    """The router's open requests. Their outputs go to nobody else."""

    def __init__(self) -> None:
        self.by_id: dict[str, tuple[list[EngineCoreOutput], Ended]] = {}
        """What each has brought so far, and what awaits its end."""

    def expect(self, request_id: str) -> Ended:
        """Record that a request is being sent. Returns a future for its outputs.

        It raises `EngineGenerateError` if the request failed, `EngineDeadError` if the engine is
        lost. A caller that stops awaiting it calls `forget`.
        """
        ended: Ended = asyncio.get_running_loop().create_future()
        self.by_id[request_id] = [], ended
        return ended

    def forget(self, request_id: str) -> None:
        del self.by_id[request_id]

    def take(self, output: EngineCoreOutput) -> bool:
        """Take an output if it belongs to one of these requests; False if it does not."""
        own = self.by_id.get(output.request_id)
        if own is None:
            return False
        outputs, ended = own
        outputs.append(output)
        if output.finished and not ended.done():
            if output.finish_reason is FinishReason.ERROR:
                ended.set_exception(EngineGenerateError(output.error or "no reason given"))
            else:
                ended.set_result(outputs)
        return True

    def lose(self, cause: EngineDeadError) -> None:
        """Fail all of them, because the engine is gone."""
        for _, ended in self.by_id.values():
            if not ended.done():
                ended.set_exception(EngineDeadError(str(cause)))
