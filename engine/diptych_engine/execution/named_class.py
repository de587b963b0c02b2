"""Classes of the operator's own, which a configuration names as `module:Class`.

Only who configures the engine can name one, never a client.
"""

from __future__ import annotations

import importlib
from functools import reduce
from typing import Any

from diptych_protocol import InvalidRequestError


def named_class(spec: str, param: str) -> Any:
    """The class of that name. Raises `InvalidRequestError`, with `param`, if there is none."""
    module, _, path = spec.partition(":")
    try:
        return reduce(getattr, path.split("."), importlib.import_module(module))
    except Exception as exc:  # somebody else's code
        raise refusal(spec, param, exc) from exc


def refusal(spec: str, param: str, exc: Exception) -> InvalidRequestError:
    """The error for a class that cannot be used."""
    return InvalidRequestError(f"{param} {spec!r}: {type(exc).__name__}: {exc}", param=param)
