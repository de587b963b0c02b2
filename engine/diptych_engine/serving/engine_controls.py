"""The blocking control calls of an LLMEngine, which correspond to AsyncLLM's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from diptych_frontend.core_client.foreign_options import importable_name
from diptych_protocol import ControlCall, EngineConfig, UnsupportedFeatureError
from diptych_protocol.control_calls import (
    APPLY_MODEL,
    CALL_FUNCTION,
    CALL_TIMEOUT_S,
    REST_TIMEOUT_S,
    BlockingCalls,
)

if TYPE_CHECKING:
    from diptych_engine.models import CausalLM

T = TypeVar("T")


class EngineControls(BlockingCalls):
    """A mixin for an engine that has a core. Every method raises `UtilityError` if the core refuses
    or fails, `TimeoutError` if it takes too long, and `EngineDeadError` if it has ended."""

    vllm_config: EngineConfig
    """The engine's settings."""

    @abstractmethod
    def call_core(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Make a utility call."""

    def control(self, call: ControlCall[Any]) -> Any:
        return self.call_core(call.METHOD, *call.arguments, timeout_s=call.timeout_s)

    @property
    @abstractmethod
    def only_worker(self) -> Any:
        """The runner of the whole model, if it is in this process; otherwise None."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method or a function of every worker; return the results in the order of their
        ranks. A function must be importable, and `allow_functions` set, unless the only worker is
        in this process. The method `apply_model` with a function does the same as `apply_model`."""
        if method == APPLY_MODEL and args and callable(args[0]):
            return self.apply_model(*args, **(kwargs or {}))
        if callable(method):
            if self.only_worker is not None:
                return [method(self.only_worker, *args, **(kwargs or {}))]
            args = (self._name_of(method, "method"), *args)
            method = CALL_FUNCTION
        wait_s = REST_TIMEOUT_S if timeout is None else timeout
        results = self.call_core(
            "collective_rpc", method, list(args), kwargs or {}, timeout_s=wait_s
        )
        return list(results)

    def apply_model(self, func: Callable[[CausalLM], T]) -> list[T]:
        """Call a function with every worker's model, as `collective_rpc` does with the worker."""
        if self.only_worker is not None:
            return [func(self.only_worker.model)]
        return self.collective_rpc(APPLY_MODEL, args=(self._name_of(func, "func"),))

    def _name_of(self, function: Callable[..., Any], param: str) -> str:
        if not self.vllm_config.allow_functions:
            raise UnsupportedFeatureError(
                f"{param} can be a function only where the whole model is in this process, or with "
                "allow_functions=True in the engine's settings"
            )
        return importable_name(function, param)
