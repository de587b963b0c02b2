"""The control calls of an `EngineClient`, with the names and arguments of vLLM's."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NoReturn

from diptych_protocol.control_calls import AwaitedCalls, ControlCall, PauseGeneration, PauseMode
from diptych_protocol.engine_client import EngineClient
from diptych_protocol.errors import UnsupportedFeatureError
from diptych_protocol.outputs import PoolingRequestOutput


class ControlledClient(AwaitedCalls, EngineClient):
    """A client whose control calls all go through one method."""

    async def pause_generation(
        self,
        mode: PauseMode = "abort",
        clear_cache: bool = True,
        *,
        wait_for_inflight_requests: bool = False,
    ) -> None:
        """As `EngineClient.pause_generation`."""
        await self.control(
            PauseGeneration("wait" if wait_for_inflight_requests else mode, clear_cache)
        )


class WithoutControl(ControlledClient):
    """An EngineClient over engines that it does not own.

    It answers every control call with `UnsupportedFeatureError`, because the call is for one engine
    and has to be sent there.
    """

    async def control(self, call: ControlCall[Any]) -> Any:
        if not call.READS:
            _refuse(call.METHOD)
        return False

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        _refuse("encode")
        yield


def _refuse(call: str) -> NoReturn:
    raise UnsupportedFeatureError(f"{call} acts on one engine: send it to that engine's admin port")
