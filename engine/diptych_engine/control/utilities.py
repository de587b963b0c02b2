"""Utility calls from outside: their arguments are checked by the method's annotations, and answers
may come later.

A call that cannot be answered at once, because its answer depends on steps, on the hinge, or on
another thread, returns a `Future`. The engine's loop continues and sends the answer when there is
one, so nobody else waits for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, get_type_hints

import msgspec

from diptych_protocol import InvalidRequestError

Convert = Callable[[Any, Any], Any]
"""Converts a value that msgpack decoded to the declared type; raises `msgspec.ValidationError`."""


def call_utility(
    method: Callable[..., Any], args: list[Any], convert: Convert = msgspec.convert
) -> Any:
    """Call `method` with checked and converted arguments.

    Raises `InvalidRequestError` for too many, too few or wrong arguments.
    """
    function = getattr(method, "__func__", method)
    signature, hints = _declared(function, bound=function is not method)
    try:
        signature.bind(*args)
    except TypeError as exc:
        raise InvalidRequestError(f"the arguments do not fit: {exc}") from None
    names, converted = [*signature.parameters], list[Any]()
    for index, value in enumerate(args):
        name = names[min(index, len(names) - 1)]  # the last one may be *args
        try:
            converted.append(convert(value, hints.get(name, Any)))
        except msgspec.ValidationError as exc:
            raise InvalidRequestError(f"argument {name}: {exc}", param=name) from None
    return method(*converted)


@lru_cache(256)
def _declared(
    function: Callable[..., Any], *, bound: bool
) -> tuple[inspect.Signature, dict[str, Any]]:
    """What a function takes, without its `self` if that is bound; looked up once: it is slow."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[bound:]
    return signature.replace(parameters=parameters), get_type_hints(function)


T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class _Waiting:
    ready: Callable[[], bool]
    then: Callable[[], Any]
    answer: Future[Any]


class Deferred:
    """Functions that wait until the engine is in some state."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def when(self, ready: Callable[[], bool], then: Callable[[], T]) -> Future[T]:
        """Call `then` between two steps as soon as `ready` returns true; the future gets its
        result.

        If either of them raises, the future gets the exception.
        """
        answer: Future[T] = Future()
        self._waiting.append(_Waiting(ready, then, answer))
        return answer

    def settle(self) -> None:
        """Call every function that is ready. Call this after a step, when its outputs were sent."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        kept = [entry for entry in waiting if not _try(entry)]
        self._waiting = kept + self._waiting


def _try(entry: _Waiting) -> bool:
    """Whether this is over, one way or the other."""
    if entry.answer.cancelled():
        return True
    try:
        if not entry.ready():
            return False
        entry.answer.set_result(entry.then())
    except Exception as exc:  # it fails whoever called, not the engine
        entry.answer.set_exception(exc)
    return True
