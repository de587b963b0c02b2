"""The control calls of an `EngineClient`, under the names and with the arguments of vLLM's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from diptych_protocol.control_calls import (
    AddLora,
    AnyControlCall,
    IsPaused,
    IsSleeping,
    PauseGeneration,
    PauseMode,
    ResetEncoderCache,
    ResetMmCache,
    ResetPrefixCache,
    ResumeGeneration,
    Sleep,
    StartProfile,
    StopProfile,
    WakeUp,
)
from diptych_protocol.engine_client import EngineClient
from diptych_protocol.weights import LoRARequest


class ControlledClient(EngineClient):
    """Every control call goes through one method."""

    @abstractmethod
    async def control(self, call: AnyControlCall) -> Any:
        """Have the engine do what a call says. Returns what the core answers, undecoded."""

    async def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
    ) -> None:
        await self.control(
            PauseGeneration("wait" if wait_for_inflight_requests else mode, clear_cache)
        )

    async def resume_generation(self) -> None:
        await self.control(ResumeGeneration())

    async def is_paused(self) -> bool:
        return bool(await self.control(IsPaused()))

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        await self.control(Sleep(level, mode))  # type: ignore[arg-type]  # the core checks it

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        wanted: Any = None if tags is None else list(tags)
        await self.control(WakeUp(wanted))

    async def is_sleeping(self) -> bool:
        return bool(await self.control(IsSleeping()))

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return bool(await self.control(ResetPrefixCache(reset_running_requests, reset_connector)))

    async def reset_mm_cache(self) -> None:
        await self.control(ResetMmCache())

    async def reset_encoder_cache(self) -> None:
        await self.control(ResetEncoderCache())

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """The names of the files begin with the prefix, or with the engine's id."""
        await self.control(StartProfile(profile_prefix or ""))

    async def stop_profile(self) -> None:
        await self.control(StopProfile())

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        return bool(await self.control(AddLora(lora_request)))
