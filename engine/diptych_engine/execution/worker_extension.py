"""Loads the operator's own code by its name, `module:Class` or `module:function`: among it worker
methods, for `collective_rpc`. Only the configuration can name it, or let clients do so.

`EngineConfig.worker_extension` names a class as `module:Class`. Each worker makes one, with itself
(a `ModelRunner`) as the only argument; its public methods may then be called by name, on every
worker. With `EngineConfig.allow_functions` clients may also name any function, as
`module:function`: only its name is sent, never its code.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import reduce
from typing import Any

from diptych_engine.execution.lean_torch import whole_torch
from diptych_protocol import EngineConfig, InvalidRequestError
from diptych_protocol.control_calls import APPLY_MODEL, CALL_FUNCTION


def named(spec: str, param: str) -> Any:
    """Return the object of that name. Raises `InvalidRequestError`, with `param`, if
    there is none."""
    module, _, path = spec.partition(":")
    whole_torch()  # it may use anything of it
    try:
        return reduce(getattr, path.split("."), importlib.import_module(module))
    except Exception as exc:  # somebody else's code
        raise refusal(spec, param, exc) from exc


def refusal(spec: str, param: str, exc: Exception) -> InvalidRequestError:
    """Return the error for an object that cannot be used."""
    return InvalidRequestError(f"{param} {spec!r}: {type(exc).__name__}: {exc}", param=param)


def extension_methods(config: EngineConfig, worker: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods that a configuration adds to the worker's.

    Raises `InvalidRequestError` if there is no such class or it cannot be made.
    """
    methods = _public_methods(config.worker_extension, worker) if config.worker_extension else {}
    if config.allow_functions:
        methods[CALL_FUNCTION] = lambda name, *args, **kwargs: named(name, "method")(
            worker, *args, **kwargs
        )
        methods[APPLY_MODEL] = lambda name: named(name, "func")(worker.model)
    return methods


def _public_methods(spec: str, worker: Any) -> dict[str, Callable[..., Any]]:
    extension_class = named(spec, "worker_extension")
    try:
        extension = extension_class(worker)
    except Exception as exc:  # somebody else's code
        raise refusal(spec, "worker_extension", exc) from exc
    members = ((name, getattr(extension, name)) for name in dir(extension))
    return {
        name: member for name, member in members if callable(member) and not name.startswith("_")
    }
