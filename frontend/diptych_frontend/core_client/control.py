"""The control calls of an EngineClient that has one engine core: pause, sleep, resets, profiles."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final, get_args

from diptych_protocol import EngineClient, InvalidRequestError, PauseMode

CALL_TIMEOUT_S: Final = 60.0
REST_TIMEOUT_S: Final = 3600.0
"""Until requests have come to rest: a pause that waits for them takes as long as they do."""
MOVE_TIMEOUT_S: Final = 1800.0
"""Until weights are put aside or back; those of a large model come from a slow disk."""


class CoreControl(EngineClient):
    """Sends each call to the core, which answers when it is done.

    All calls raise `UtilityError` when the core refuses, `TimeoutError` when it takes too long, and
    `EngineDeadError` when it is gone.
    """

    @abstractmethod
    async def call_core(self, method: str, *args: Any, timeout_s: float) -> Any:
        """A utility call to the core."""

    @abstractmethod
    def silence_expected(self) -> contextlib.AbstractContextManager[None]:
        """The core may be too busy to answer meanwhile, and yet be well."""

    # --- pause --------------------------------------------------------------------------------

    async def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
    ) -> None:
        if wait_for_inflight_requests:
            mode = "wait"
        _check_mode(mode)
        await self.call_core("pause_generation", mode, clear_cache, timeout_s=REST_TIMEOUT_S)

    async def resume_generation(self) -> None:
        await self.call_core("resume_generation", timeout_s=CALL_TIMEOUT_S)

    async def is_paused(self) -> bool:
        return bool(await self.call_core("is_paused", timeout_s=CALL_TIMEOUT_S))

    # --- sleep --------------------------------------------------------------------------------

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        _check_mode(mode)
        with self.silence_expected():
            timeout_s = REST_TIMEOUT_S + MOVE_TIMEOUT_S
            await self.call_core("sleep", level, mode, timeout_s=timeout_s)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        with self.silence_expected():
            wanted = None if tags is None else list(tags)
            await self.call_core("wake_up", wanted, timeout_s=MOVE_TIMEOUT_S)

    async def is_sleeping(self) -> bool:
        return bool(await self.call_core("is_sleeping", timeout_s=CALL_TIMEOUT_S))

    # --- caches -------------------------------------------------------------------------------

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        done = await self.call_core(
            "reset_prefix_cache",
            reset_running_requests,
            reset_connector,
            timeout_s=REST_TIMEOUT_S if reset_connector else CALL_TIMEOUT_S,
        )
        return bool(done)

    async def reset_mm_cache(self) -> None:
        await self.call_core("reset_mm_cache", timeout_s=CALL_TIMEOUT_S)

    async def reset_encoder_cache(self) -> None:
        await self.call_core("reset_encoder_cache", timeout_s=CALL_TIMEOUT_S)

    # --- profile ------------------------------------------------------------------------------

    async def start_profile(self) -> None:
        await self.call_core("start_profile", timeout_s=CALL_TIMEOUT_S)

    async def stop_profile(self) -> None:
        with self.silence_expected():
            await self.call_core("stop_profile", timeout_s=MOVE_TIMEOUT_S)


def _check_mode(mode: str) -> None:
    if mode not in get_args(PauseMode):
        modes = ", ".join(get_args(PauseMode))
        raise InvalidRequestError(f"mode must be one of {modes}, not {mode!r}", param="mode")
