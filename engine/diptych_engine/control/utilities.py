"""Utility calls from outside: their arguments are what the method's annotations say, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec

from diptych_protocol import InvalidRequestError

Convert = Callable[[Any, Any], Any]
"""Makes a value that msgpack brought the type that is wanted; raises `msgspec.ValidationError`."""


def call_utility(
    method: Callable[..., Any], args: list[Any], convert: Convert = msgspec.convert
) -> Any:
    """Call `method` with arguments that were checked and converted.

    Raises `InvalidRequestError` for arguments that are too many, too few or of the wrong type.
    """
    parameters = list(inspect.signature(method).parameters.values())
    try:
        inspect.signature(method).bind(*args)
    except TypeError as exc:
        raise InvalidRequestError(f"the arguments do not fit: {exc}") from None
    hints = get_type_hints(method)
    converted = [
        _argument(parameters, index, value, hints, convert) for index, value in enumerate(args)
    ]
    return method(*converted)


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
