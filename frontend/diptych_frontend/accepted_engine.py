"""Adapts an engine client of another project to the calls of the servers here."""

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
"""What these methods of our `EngineClient` accept by name beyond vLLM's parameters."""


def accepted(engine: EngineClient) -> EngineClient:
    """Return the engine itself, or a wrapper that passes only the arguments that it accepts.

    An engine needs only the members of vLLM's documentation, with the parameters given there. Their
    signatures are read once, here, and not in each call.
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
