"""Engines that make steps together without a common front-end, each driven by its own program."""

from __future__ import annotations

from diptych_engine.parallel.group import group_of, join_group
from diptych_protocol import EngineConfig, EngineDeadError


class LockstepPeers:
    """One engine among them. All have to ask before each step whether to continue."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises `InvalidRequestError` if the configuration does not say where they meet."""
        self.group = group_of(config)

    def join(self) -> None:
        """Wait for the other engines. Raises what `join_group` raises."""
        join_group(self.group)

    def any_unfinished(self, own: bool) -> bool:
        """Whether some engine has work, including this one (`own`).

        Raises `EngineDeadError` when one of them is gone.
        """
        try:
            return self.group.any(own)
        except RuntimeError as exc:
            raise EngineDeadError(f"the group in lock-step broke: {exc}") from exc
