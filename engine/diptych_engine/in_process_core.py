"""An EngineCore in the caller's own process and thread, with the face of a client of one."""

from __future__ import annotations

import gc
import select
from typing import Any

from diptych_engine.build_core import build_core
from diptych_engine.core import EngineCore
from diptych_protocol import (
    ClientClosedError,
    DiptychError,
    EngineConfig,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityCall,
    UtilityError,
    UtilityOutput,
    wire,
)

CLIENT = b""
"""The only client of such a core."""
OUTPUT_WAIT_S = 1.0


class InProcessCore:
    """Takes a step whenever outputs are asked for; nothing happens in between."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model. Raises what `build_core` raises."""
        self._core: EngineCore | None = build_core(config)
        self.description = self._core.description

    @property
    def core(self) -> EngineCore:
        """Raises `ClientClosedError` after `close`."""
        if self._core is None:
            raise ClientClosedError("the engine was shut down")
        return self._core

    def add(self, request: EngineCoreRequest) -> None:
        self.core.add(request, CLIENT)

    def abort(self, request_ids: list[str]) -> None:
        self.core.abort(request_ids)

    def get_outputs(self, wait_s: float = OUTPUT_WAIT_S) -> list[EngineCoreOutput]:
        """Take one step; what came of it.

        If all that is left waits for blocks from another engine, it waits for them, `wait_s` at
        most.
        """
        core = self.core
        core.handle_transfer_events()
        if core.has_work:
            plan, result = core.start_step()
            core.finish_step(plan, result)
            if not plan.scheduled and core.connector is not None:
                select.select([core.connector.wake_fd], [], [], wait_s)
                core.handle_transfer_events()
        return core.take_outputs().get(CLIENT, [])

    def call(self, method: str, *args: Any, timeout_s: float = 0.0) -> Any:
        """A utility call, whose arguments and answer take the form that they have on the wire.

        Raises `UtilityError` if the core refuses it or it fails there.
        """
        sent = wire.utility_decoder.decode(wire.encoder.encode(UtilityCall(0, 0, method, [*args])))
        try:
            result = self.core.call(sent.method, sent.args)
        except (DiptychError, TypeError, ValueError) as exc:
            raise UtilityError(f"{method}: {exc}") from exc
        answer = EngineCoreOutputs(utility_output=UtilityOutput(0, result=result))
        received = wire.outputs_decoder.decode(wire.encoder.encode(answer)).utility_output
        return None if received is None else received.result

    def close(self, timeout_s: float = 0.0) -> None:
        """Give back memory and threads. Safe to call twice."""
        if self._core is not None:
            self._core.close()
            self._core = None
            gc.collect()  # an engine's parts refer to each other; the next one needs their memory
