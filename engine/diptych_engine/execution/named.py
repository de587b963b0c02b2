"""Code of the operator's own, by its name: `module:Class` or `module:function`.

Only who configures the engine can name it or, with `allow_functions`, let clients do so.
"""

from __future__ import annotations

import importlib
from functools import reduce
from typing import Any

from diptych_protocol import InvalidRequestError


def named(spec: str, param: str) -> Any:
    """What has that name. Raises `InvalidRequestError`, with `param`, if nothing has."""
    module, _, path = spec.partition(":")
    try:
        return reduce(getattr, path.split("."), importlib.import_module(module))
    except Exception as exc:  # somebody else's code
        raise refusal(spec, param, exc) from exc


def refusal(spec: str, param: str, exc: Exception) -> InvalidRequestError:
    """The error for something that cannot be used."""
    return InvalidRequestError(f"{param} {spec!r}: {type(exc).__name__}: {exc}", param=param)
