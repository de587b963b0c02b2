"""The control calls of an LLMEngine: the blocking twins of an AsyncLLM's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from diptych_frontend.core_client.foreign_options import refuse_foreign
from diptych_protocol import LoRARequest
from diptych_protocol.engine_client import PauseMode

if TYPE_CHECKING:
    from diptych_engine.control.core import Runner
    from diptych_engine.models import CausalLM

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
LONG_CALL_TIMEOUT_S = 3600.0
"""For what waits until requests have come to rest, or moves weights."""


class EngineControls(ABC):
    """Mixed into an engine that has a core. Every method raises `UtilityError` if the core refuses
    or fails, `TimeoutError` if it takes too long, and `EngineDeadError` if it has ended."""

    @abstractmethod
    def call_core(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """A utility call."""

    @abstractmethod
    def call_workers(self, function: Callable[[Any], T]) -> list[T]:
        """Call a function with each worker of a core in this process.

        Raises `UnsupportedFeatureError` for a core elsewhere: no code crosses to a process.
        """

    # --- pause and sleep ----------------------------------------------------------------------

    def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        self.call_core("pause_generation", mode, clear_cache, timeout_s=LONG_CALL_TIMEOUT_S)

    def resume_generation(self) -> None:
        self.call_core("resume_generation")

    def is_paused(self) -> bool:
        return bool(self.call_core("is_paused"))

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        self.call_core("sleep", level, mode, timeout_s=LONG_CALL_TIMEOUT_S)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        wanted = None if tags is None else list(tags)
        self.call_core("wake_up", wanted, timeout_s=LONG_CALL_TIMEOUT_S)

    def is_sleeping(self) -> bool:
        return bool(self.call_core("is_sleeping"))

    # --- caches -------------------------------------------------------------------------------

    def reset_mm_cache(self) -> None:
        self.call_core("reset_mm_cache")

    def reset_encoder_cache(self) -> None:
        self.call_core("reset_encoder_cache")

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """False if a block is in use."""
        return bool(self.call_core("reset_prefix_cache", reset_running_requests, reset_connector))

    # --- profiles -----------------------------------------------------------------------------

    def start_profile(self, profile_prefix: None = None) -> None:
        """Files are named for the engine: a prefix of one's own is refused."""
        refuse_foreign(profile_prefix=profile_prefix)
        self.call_core("start_profile")

    def stop_profile(self) -> None:
        self.call_core("stop_profile", timeout_s=LONG_CALL_TIMEOUT_S)

    # --- adapters -----------------------------------------------------------------------------

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter for future requests."""
        return bool(self.call_core("add_lora", lora_request, timeout_s=LONG_CALL_TIMEOUT_S))

    def remove_lora(self, lora_id: int) -> bool:
        """False if it is not loaded."""
        return bool(self.call_core("remove_lora", lora_id))

    def list_loras(self) -> set[int]:
        return set(self.call_core("list_loras"))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter from being evicted; False if it is not loaded."""
        return bool(self.call_core("pin_lora", lora_id))

    # --- workers ------------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str | Callable[[Runner], T],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method of every worker, or a function of every worker of a core in this process;
        the results in the order of their ranks."""
        if callable(method):
            function = method
            return self.call_workers(lambda worker: function(worker, *args, **(kwargs or {})))
        wait_s = LONG_CALL_TIMEOUT_S if timeout is None else timeout
        results = self.call_core(
            "collective_rpc", method, list(args), kwargs or {}, timeout_s=wait_s
        )
        return list(results)

    def apply_model(self, func: Callable[[CausalLM], T]) -> list[T]:
        """Call a function with every worker's model."""
        return self.call_workers(lambda worker: func(worker.model))
