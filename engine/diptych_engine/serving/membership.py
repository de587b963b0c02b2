"""A core's part in a data-parallel group whose size changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from diptych_engine.control.core import EngineCore
from diptych_protocol import (
    EngineConfig,
    FinishReason,
    InvalidRequestError,
    ReconfigureDistributedRequest,
    ReconfigureRankType,
)
from diptych_protocol.engine_settings import MAX_RANKS

log = logging.getLogger(__name__)


class Membership:
    """The calls of a group's owner to one core in it."""

    def __init__(self, core: EngineCore, config: EngineConfig, end: Callable[[], None]) -> None:
        """`end` ends the core's process cleanly."""
        self._core = core
        self._lockstep = config.data_parallel_lockstep
        self._rank = config.data_parallel_rank
        self._end = end

    @property
    def calls(self) -> tuple[Callable[..., Any], ...]:
        """The functions that a client may name in a utility call."""
        return self.surrender, self.reinitialize_distributed

    def surrender(self) -> dict[str, list[int]]:
        """End every request without any output, so that another core can continue it.

        Returns what each has generated and sent to its client so far.
        """
        scheduler = self._core.scheduler
        requests = list(scheduler.unfinished)
        for request in requests:
            scheduler.finish(request, FinishReason.ABORT)
        return {
            request.request_id: request.token_ids[request.num_prompt_tokens :]
            for request in requests
        }

    def reinitialize_distributed(self, reconfigure: ReconfigureDistributedRequest) -> None:
        """Change the group's size. A core without a place in it ends.

        Raises `InvalidRequestError` for a change that this core cannot make.
        """
        size, rank = reconfigure.new_data_parallel_size, reconfigure.new_data_parallel_rank
        if not 1 <= size <= MAX_RANKS:
            raise InvalidRequestError(f"new_data_parallel_size must be 1 to {MAX_RANKS}")
        if rank == ReconfigureRankType.SHUTDOWN_CURRENT_RANK:
            log.info("rank %d leaves a group that shrinks to %d", self._rank, size)
            self._end()
        elif self._lockstep:
            raise InvalidRequestError("cores in lock-step keep the number that they started with")
        elif rank not in (ReconfigureRankType.KEEP_CURRENT_RANK, self._rank):
            raise InvalidRequestError(f"rank {self._rank} cannot become rank {rank}")
