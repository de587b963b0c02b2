"""An engine client that others wrote, as the servers here call it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, cast

from diptych_protocol import EngineClient, OurOptions

OURS: Final[dict[str, frozenset[str]]] = {
    "generate": frozenset(OurOptions.__annotations__),
    "encode": frozenset(OurOptions.__annotations__),
    "check_admission": frozenset({"num_tokens", "tenant"}),
}
"""What these methods of `EngineClient` take by name besides what vLLM's takes."""


def accepted(engine: EngineClient) -> EngineClient:
    """The engine itself, or one in front of it that gives it only what it takes.

    An engine needs no more than the members of vLLM's document, with the parameters that stand
    there. Their signatures are looked at here, once, and not with each call.
    """
    if isinstance(engine, EngineClient) and not any(_foreign(engine, name) for name in OURS):
        return engine
    return cast(EngineClient, _DocumentedEngine(engine))


class _DocumentedEngine:
    """Has all that an `EngineClient` has: what the engine lacks is as in that class."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        for name in OURS:
            setattr(self, name, _without(_foreign(self, name), getattr(self, name)))

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._engine, name):
            return getattr(self._engine, name)
        return inspect.getattr_static(EngineClient, name).__get__(self)


def _foreign(engine: Any, name: str) -> frozenset[str]:
    """Which of our parameters a method of the engine's does not take."""
    parameters = inspect.signature(getattr(engine, name)).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return frozenset()
    return OURS[name].difference(parameters)


def _without(foreign: frozenset[str], method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, called without these parameters."""
    if not foreign:
        return method

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **{k: v for k, v in kwargs.items() if k not in foreign})

    return call
