"""Engines that step together without a front-end in common, each driven by its own program."""

from __future__ import annotations

from collections.abc import Callable

from diptych_engine.parallel.group import SumGroup, join_group
from diptych_engine.serving.in_process_core import InProcessCore
from diptych_protocol import EngineConfig, EngineDeadError, InvalidRequestError


class LockstepPeers:
    """One engine's place among them. All have to ask before each step whether to go on."""

    def __init__(self, group: SumGroup, dummy_batch: Callable[[], object]) -> None:
        """`dummy_batch` runs the model for nobody."""
        self.group = group
        self._dummy_batch = dummy_batch
        self.wanted = False

    def any_unfinished(self, own: bool) -> bool:
        """Whether some engine has work, be it this one (`own`).

        Raises `EngineDeadError` when one of them is gone.
        """
        try:
            anywhere = self.group.any(own)
        except RuntimeError as exc:
            raise EngineDeadError(f"the group in lock-step broke: {exc}") from exc
        self.wanted = anywhere and not own
        return anywhere

    def keep(self) -> None:
        """Step along with the others, if that is all there is to do."""
        if self.wanted:
            self.wanted = False
            self._dummy_batch()


def join_lockstep_peers(core: object, config: EngineConfig) -> LockstepPeers:
    """Wait for the other engines. Raises what `join_group` raises."""
    if not isinstance(core, InProcessCore):
        raise InvalidRequestError(
            "an LLMEngine in lock-step has its core in its own process", param="multiprocess_mode"
        )
    runner = core.core.runner
    return LockstepPeers(join_group(config), lambda: runner.collective_rpc("execute_dummy_batch"))
