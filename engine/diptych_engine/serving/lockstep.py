"""The loop of a core that makes its steps together with the others of its group.

`waves` decides when; this module connects it with sockets and the group. A core that has nothing to
compute while others have runs the model on a dummy token, because in a model whose layers are
shared between cores the others wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from diptych_engine.control.core import EngineCore
from diptych_engine.parallel.group import SumGroup
from diptych_engine.scheduling.request import Pending, StepPlan
from diptych_engine.serving.core_server import CoreServer
from diptych_engine.serving.waves import WaveMember
from diptych_protocol import (
    CurveKeys,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineDeadError,
    wire,
)
from diptych_protocol.arrays import Frame

STEPS_BETWEEN_SUMS: Final = 16
"""After the last request of a wave, its cores make fewer dummy steps than this."""


class LockstepServer(CoreServer):
    """A `CoreServer` that takes part in waves."""

    def __init__(
        self,
        core: EngineCore,
        endpoints: Sequence[tuple[str, CurveKeys | None]],
        shutdown_timeout_s: float,
        group: SumGroup,
    ) -> None:
        super().__init__(core, endpoints, shutdown_timeout_s, group.rank)
        self._group = group
        self._waves = WaveMember(group.rank, group.size, STEPS_BETWEEN_SUMS)
        core.rest_conditions.append(lambda: self._waves.paused)

    def _turn(self) -> None:
        self._announce(self._waves.on_pause(self._core.scheduler.paused))
        super()._turn()
        if self._waves.sum_due:
            self._add_up()

    def _has_work(self) -> bool:
        waves = self._waves
        return waves.running or (super()._has_work() and not waves.paused)

    def _start_step(self) -> tuple[StepPlan, Pending]:
        if super()._has_work():
            self._announce(self._waves.on_work())
        plan, pending = super()._start_step()
        if not plan.scheduled:
            self._core.runner.collective_rpc("execute_dummy_batch")
            self._core.dummy_steps += 1
        self._waves.on_step()
        return plan, pending

    def _idle_wait_ms(self) -> int:
        return 0 if self._waves.running else super()._idle_wait_ms()

    def _add_up(self) -> None:
        """Agree with the others on whether anything is left. Raises `EngineDeadError` when one of
        them is gone."""
        total = torch.tensor(self._waves.term(self._core.has_work), dtype=torch.int64)
        try:
            self._group.sum_(total)
        except RuntimeError as exc:
            if self._stop_wanted:  # the others were told to end, too
                self._waves.running = False
                return
            raise EngineDeadError(f"the group in lock-step broke: {exc}") from exc
        complete = self._waves.on_sum(total.tolist())
        if complete is not None:
            self._tell_all(EngineCoreOutputs(self._rank, wave_complete=complete))
        self._core.deferred.settle()
        self._send_answers()

    # --- messages -----------------------------------------------------------------------------

    def _handle(self, client: bytes, frames: list[bytes], arrays: list[Frame]) -> None:
        if frames[0] == EngineCoreRequestType.START_DP_WAVE.value:
            wave, exclude = wire.wave_decoder.decode(frames[1:])
            self._waves.on_start(wave, exclude)
        else:
            super()._handle(client, frames, arrays)

    def _add(self, request: EngineCoreRequest, client: bytes) -> None:
        self._announce(self._waves.on_request(request.current_wave))
        super()._add(request, client)

    def _announce(self, wave: int | None) -> None:
        if wave is not None:
            self._tell_all(EngineCoreOutputs(self._rank, start_wave=wave))

    def _tell_all(self, message: EngineCoreOutputs) -> None:
        for client in list(self._clients):
            self._send(client, message)
