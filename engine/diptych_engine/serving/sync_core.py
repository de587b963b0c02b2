"""The core of an LLMEngine: in this process, or in one of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from diptych_frontend.core_client.launcher import START_TIMEOUT_S, CoreProcess
from diptych_frontend.core_client.sync_client import SyncCoreClient
from diptych_protocol import (
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDescription,
    InvalidRequestError,
    UnsupportedFeatureError,
)

if TYPE_CHECKING:
    from diptych_engine.parallel.group import LockstepGroup

MULTIPROCESSING = "DIPTYCH_ENABLE_MULTIPROCESSING"
"""Environment variable: `1` gives every engine's core a process of its own."""


class SyncCore(Protocol):
    """A core with blocking calls: `InProcessCore` or `SyncCoreClient`."""

    description: EngineDescription

    def add(self, request: EngineCoreRequest) -> None: ...

    def abort(self, request_ids: list[str]) -> None: ...

    def get_output(self) -> EngineCoreOutputs: ...

    def call(self, method: str, *args: Any, timeout_s: float) -> Any: ...

    def close(self) -> None: ...


def lockstep_group_of(config: EngineConfig, in_process_of_its_own: bool) -> LockstepGroup | None:
    """Return the engines that make steps together with this one, not joined yet; None for a single
    engine.

    Raises `UnsupportedFeatureError` for cores that share requests, which need an `AsyncLLM`. Raises
    `InvalidRequestError` for engines in lock-step that cannot work or do not know where to meet.
    """
    if config.data_parallel_size == 1:
        return None
    if not config.data_parallel_lockstep:
        raise UnsupportedFeatureError(
            "an LLMEngine has one core; for data_parallel_size > 1 use AsyncLLM, or "
            "data_parallel_lockstep with an engine in each program"
        )
    if in_process_of_its_own:
        raise InvalidRequestError(
            "an LLMEngine in lock-step has its core in its own process", param="multiprocess_mode"
        )
    from diptych_engine.parallel.group import LockstepGroup

    return LockstepGroup(config)


def make_core(config: EngineConfig, in_process_of_its_own: bool) -> SyncCore:
    if in_process_of_its_own:
        return SyncCoreClient(CoreProcess(config), START_TIMEOUT_S)
    # Only here, so that a program whose cores run elsewhere needs no torch.
    from diptych_engine.serving.in_process_core import InProcessCore

    return InProcessCore(config)


def wants_process() -> bool:
    return os.environ.get(MULTIPROCESSING, "0") not in ("", "0")
