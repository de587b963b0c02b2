"""Carries out the control calls of the wire that vLLM's `AsyncLLM` supports."""

from __future__ import annotations

from typing import Any

import msgspec

from diptych_protocol import InvalidRequestError
from diptych_protocol.control_calls import (
    CONTROL_CALLS,
    AddLora,
    ControlCall,
    IsPaused,
    IsSleeping,
    ListLoras,
    PauseGeneration,
    PinLora,
    RemoveLora,
    ResetEncoderCache,
    ResetMmCache,
    ResetPrefixCache,
    ResumeGeneration,
    Sleep,
    StartProfile,
    StopProfile,
    WakeUp,
)
from diptych_vllm.serve.adapters import VllmAdapters

_BY_METHOD = {kind.METHOD: kind for kind in CONTROL_CALLS}


class VllmCalls:
    """Carries out control calls on one `AsyncLLM`."""

    def __init__(
        self, llm: Any, adapters: VllmAdapters, *, can_sleep: bool, has_adapters: bool
    ) -> None:
        """
        Args:
            llm: an `AsyncLLM`.
            can_sleep: whether it can free memory while it does nothing.
            has_adapters: whether it was started with support for adapters.
        """
        self._llm, self._adapters = llm, adapters
        self._can_sleep, self._has_adapters = can_sleep, has_adapters

    async def run(self, method: str, args: list[Any]) -> Any:
        """Carry out a call. Raises `InvalidRequestError` for a call that vLLM does not offer, and
        for arguments that it does not take."""
        kind = _BY_METHOD.get(method)
        if kind is None:
            raise InvalidRequestError("there is no such call")
        if len(args) > len(kind.__struct_fields__):
            raise InvalidRequestError(f"it takes {len(kind.__struct_fields__)} arguments")
        try:
            call = msgspec.convert(dict(zip(kind.__struct_fields__, args, strict=False)), kind)
        except msgspec.ValidationError as exc:
            raise InvalidRequestError(str(exc)) from exc
        return await self._carry_out(call)

    async def _carry_out(self, call: ControlCall[Any]) -> Any:
        llm = self._llm
        match call:
            case PauseGeneration():
                await llm.pause_generation(mode=call.mode, clear_cache=call.clear_cache)
            case ResumeGeneration():
                await llm.resume_generation()
            case IsPaused():
                return await llm.is_paused()
            case Sleep():
                self._check_sleep(call.level)
                await llm.sleep(call.level, call.mode)
            case WakeUp():
                await llm.wake_up(None if call.tags is None else list(call.tags))
            case IsSleeping():
                return await llm.is_sleeping()
            case ResetPrefixCache():
                return await llm.reset_prefix_cache(
                    call.reset_running_requests, call.reset_connector
                )
            case ResetMmCache():
                await llm.reset_mm_cache()
                return ""
            case ResetEncoderCache():
                await llm.reset_encoder_cache()
                return ""
            case StartProfile():
                await llm.start_profile(call.profile_prefix or None)
            case StopProfile():
                await llm.stop_profile()
                return []
            case _:
                return await self._of_adapters(call)
        return None

    async def _of_adapters(self, call: ControlCall[Any]) -> Any:
        if not self._has_adapters and isinstance(call, AddLora | RemoveLora | ListLoras | PinLora):
            raise InvalidRequestError("this vLLM takes no adapters: start it with --enable-lora")
        match call:
            case AddLora():
                return await self._adapters.add(call.lora_request)
            case RemoveLora():
                return await self._adapters.remove(call.lora_id)
            case ListLoras():
                return self._adapters.listed()
            case PinLora():
                return await self._adapters.pin(call.lora_id)
        raise InvalidRequestError("engines of the runtime vllm do not offer this call")

    def _check_sleep(self, level: int) -> None:
        if level and not self._can_sleep:
            raise InvalidRequestError(
                "level: this vLLM frees no memory while it sleeps; start it with "
                "--enable-sleep-mode, or ask for level 0",
                param="level",
            )
