"""Checks the arguments of utility calls from outside by the method's annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, get_type_hints

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
    parameters = list(signature.parameters.values())
    converted = [
        _argument(parameters, index, value, hints, convert) for index, value in enumerate(args)
    ]
    return method(*converted)


@lru_cache(256)
def _declared(
    function: Callable[..., Any], *, bound: bool
) -> tuple[inspect.Signature, dict[str, Any]]:
    """What a function takes, without its `self` if that is bound; looked up once: it is slow."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[bound:]
    return signature.replace(parameters=parameters), get_type_hints(function)


def _argument(
    parameters: list[inspect.Parameter],
    index: int,
    value: Any,
    hints: dict[str, Any],
    convert: Convert,
) -> Any:
    name = parameters[min(index, len(parameters) - 1)].name  # the last one may be *args
    try:
        return convert(value, hints.get(name, Any))
    except msgspec.ValidationError as exc:
        raise InvalidRequestError(f"argument {name}: {exc}", param=name) from None
