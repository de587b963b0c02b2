"""Worker methods of the operator's own, for `collective_rpc`.

`EngineConfig.worker_extension` names a class as `module:Class`. Each worker makes one, with itself
(a `ModelRunner`) as the only argument; its public methods may then be called by name, on every
worker. Only who configures the engine can name the class, never a client.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from diptych_protocol import InvalidRequestError


def extension_methods(spec: str, worker: Any) -> dict[str, Callable[..., Any]]:
    """The public methods of the extension; none for an empty `spec`.

    Raises `InvalidRequestError` if there is no such class or it cannot be made.
    """
    if not spec:
        return {}
    module, _, name = spec.partition(":")
    try:
        extension = getattr(importlib.import_module(module), name)(worker)
    except Exception as exc:  # somebody else's code
        raise InvalidRequestError(
            f"worker_extension {spec!r}: {type(exc).__name__}: {exc}", param="worker_extension"
        ) from exc
    members = ((name, getattr(extension, name)) for name in dir(extension))
    return {
        name: member for name, member in members if callable(member) and not name.startswith("_")
    }
