"""The control calls of an EngineClient that has one engine core."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import Any

from diptych_protocol import ControlCall, ControlledClient


class CoreControl(ControlledClient):
    """Sends each call to the core, which answers when the call is done.

    All calls raise `UtilityError` when the core refuses, `TimeoutError` when it takes too long, and
    `EngineDeadError` when it is gone.
    """

    @abstractmethod
    async def call_core(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Make a utility call to the core."""

    @abstractmethod
    def silence_expected(self) -> contextlib.AbstractContextManager[None]:
        """During the block, the core may be too busy to answer, and yet be well."""

    async def control(self, call: ControlCall[Any]) -> Any:
        with self.silence_expected() if call.SILENT else contextlib.nullcontext():
            return await self.call_core(call.METHOD, *call.arguments, timeout_s=call.timeout_s)
