"""An EngineClient over engines that it does not own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, NoReturn

from diptych_protocol.engine_client import EngineClient, PauseMode, PromptType
from diptych_protocol.errors import UnsupportedFeatureError
from diptych_protocol.lora import LoRARequest
from diptych_protocol.pooling import PoolingParams, PoolingRequestOutput


class WithoutControl(EngineClient):
    """Answers every control call with `UnsupportedFeatureError`: it is for one engine, and has to
    be sent there."""

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

    async def start_profile(self) -> None:
        _refuse("start_profile")

    async def stop_profile(self) -> None:
        _refuse("stop_profile")

    async def reset_mm_cache(self) -> None:
        _refuse("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        _refuse("reset_encoder_cache")

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        _refuse("sleep")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        _refuse("wake_up")

    async def is_sleeping(self) -> bool:
        return False

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        _refuse("add_lora")

    async def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
    ) -> None:
        _refuse("pause_generation")

    async def resume_generation(self) -> None:
        _refuse("resume_generation")

    async def is_paused(self) -> bool:
        return False


def _refuse(call: str) -> NoReturn:
    raise UnsupportedFeatureError(f"{call} acts on one engine: send it to that engine's admin port")
