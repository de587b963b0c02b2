"""Loads the operator's own code by its name: `module:Class` or `module:function`.

Only the engine's configuration can name it or, with `allow_functions`, let clients do so.
"""

from __future__ import annotations

import importlib
from functools import reduce
from typing import Any

from diptych_protocol import InvalidRequestError


def named(spec: str, param: str) -> Any:
    """Return the object of that name. Raises `InvalidRequestError`, with `param`, if
    there is none."""
    module, _, path = spec.partition(":")
    try:
        return reduce(getattr, path.split("."), importlib.import_module(module))
    except Exception as exc:  # somebody else's code
        raise refusal(spec, param, exc) from exc


def refusal(spec: str, param: str, exc: Exception) -> InvalidRequestError:
    """Return the error for an object that cannot be used."""
    return InvalidRequestError(f"{param} {spec!r}: {type(exc).__name__}: {exc}", param=param)
