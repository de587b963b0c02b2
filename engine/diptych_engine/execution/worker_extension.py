"""Worker methods of the operator's own, for `collective_rpc`.

`EngineConfig.worker_extension` names a class as `module:Class`. Each worker makes one, with itself
(a `ModelRunner`) as the only argument; its public methods may then be called by name, on every
worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diptych_engine.execution.named_class import named_class, refusal


def extension_methods(spec: str, worker: Any) -> dict[str, Callable[..., Any]]:
    """The public methods of the extension; none for an empty `spec`.

    Raises `InvalidRequestError` if there is no such class or it cannot be made.
    """
    if not spec:
        return {}
    extension_class = named_class(spec, "worker_extension")
    try:
        extension = extension_class(worker)
    except Exception as exc:  # somebody else's code
        raise refusal(spec, "worker_extension", exc) from exc
    members = ((name, getattr(extension, name)) for name in dir(extension))
    return {
        name: member for name, member in members if callable(member) and not name.startswith("_")
    }
