"""The call `collective_rpc` for clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diptych_protocol import DiptychError, InvalidRequestError, UtilityError, wire

if TYPE_CHECKING:
    from diptych_engine.control.core import EngineCore


class WorkerCalls:
    """Runs methods of the workers between two steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def collective_rpc(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Run a public worker method on every rank; return the results in the order of the ranks.

        Raises `InvalidRequestError` for an unknown name, `UtilityError` with the message of an
        error in the method, or if its result cannot be sent.
        """
        if method.startswith("_"):
            raise InvalidRequestError(f"the worker method {method!r} is not for clients")
        try:
            results = self._core.runner.collective_rpc(method, args, kwargs)
            wire.encoder.encode(results)
        except DiptychError:
            raise
        except Exception as exc:  # it fails the call, not the engine
            raise UtilityError(f"{method}: {type(exc).__name__}: {exc}") from exc
        return results
