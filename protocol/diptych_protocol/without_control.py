"""An EngineClient over engines that it does not own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, NoReturn

from diptych_protocol.control_calls import AnyControlCall, IsPaused, IsSleeping
from diptych_protocol.controlled_client import ControlledClient
from diptych_protocol.engine_client import PromptType
from diptych_protocol.errors import UnsupportedFeatureError
from diptych_protocol.pooling import PoolingParams, PoolingRequestOutput
from diptych_protocol.weights import LoRARequest


class WithoutControl(ControlledClient):
    """Answers every control call with `UnsupportedFeatureError`: it is for one engine, and has to
    be sent there."""

    async def control(self, call: AnyControlCall) -> Any:
        if not isinstance(call, IsPaused | IsSleeping):
            _refuse(call.METHOD)
        return False

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
        *,
        tenant: str = "",
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        _refuse("encode")
        yield


def _refuse(call: str) -> NoReturn:
    raise UnsupportedFeatureError(f"{call} acts on one engine: send it to that engine's admin port")
