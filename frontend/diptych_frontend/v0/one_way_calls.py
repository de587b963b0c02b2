"""The calls of V0's client that do not wait for the engine."""

from __future__ import annotations

from collections.abc import Sequence

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.v0.params import Device
from diptych_frontend.v0.rpc import (
    RPC_REQUEST_T,
    RPCResetMultiModalCacheRequest,
    RPCResetPrefixCacheRequest,
    RPCSleepRequest,
    RPCUProfileRequest,
    RPCWakeUpRequest,
    forgets_images,
)
from diptych_frontend.v0.rpc_calls import RpcCalls
from diptych_frontend.v0.sockets import RequestSocket


class OneWayCalls(RpcCalls, AsyncLLM):
    """Each returns as soon as its message is on its way, in the order of the calls.

    All raise `MQClientClosedError` after `close`, `EngineDeadError` when the engine is gone, and
    `InvalidRequestError` for values that mean nothing. What fails in the engine is in its log;
    whoever wants the answer, or an option that V0 had not, has `control`.
    """

    input_socket: RequestSocket

    async def start_profile(self) -> None:  # type: ignore[override]  # the files' names are given
        await self._one_way(RPCUProfileRequest.START_PROFILE)

    async def stop_profile(self) -> None:
        await self._one_way(RPCUProfileRequest.STOP_PROFILE)

    async def reset_mm_cache(self) -> None:
        await self._one_way(RPCResetMultiModalCacheRequest.RESET)

    async def reset_prefix_cache(  # type: ignore[override]  # other arguments, and no answer
        self, device: Device | None = None
    ) -> None:
        """Forget cached prefixes, unless blocks are in use. No blocks are ever swapped out, so
        there are none on `Device.CPU`."""
        await self._one_way(RPCResetPrefixCacheRequest(device))

    async def sleep(self, level: int = 1) -> None:  # type: ignore[override]
        """Abort what runs, and sleep; see `EngineClient.sleep`."""
        await self._one_way(RPCSleepRequest(level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._one_way(RPCWakeUpRequest(None if tags is None else list(tags)))

    async def _one_way(self, request: RPC_REQUEST_T) -> None:
        self._check_usable()
        await self._connect()
        await self._send_one_way_rpc_request(request=request, socket=self.input_socket)
        if forgets_images(request):
            self.renderer.clear_mm_cache()
        self._cores.excuse_silence()  # it may be busy with that for a while
