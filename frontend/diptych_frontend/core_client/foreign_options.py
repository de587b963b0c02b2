"""Options of vLLM's engines as this project has them."""

from __future__ import annotations

import msgspec

from diptych_protocol import EngineConfig, InvalidRequestError, UnsupportedFeatureError

_WHY = {"mm_registry": "the model's own processor takes images"}


def refuse_foreign(**options: object) -> None:
    """Raise `UnsupportedFeatureError` unless each of the named options is None: not asked for."""
    for name, value in options.items():
        if value is not None:
            raise UnsupportedFeatureError(f"{name} must be left alone: {_WHY[name]}")


def with_executor(config: EngineConfig, executor_class: object) -> EngineConfig:
    """The configuration with this class to run the model; None leaves it as it is.

    The class travels by its name, because the model may run in another process. Raises
    `InvalidRequestError` for what has no name that can be imported.
    """
    if executor_class is None:
        return config
    if not isinstance(executor_class, type) or "<locals>" in executor_class.__qualname__:
        raise InvalidRequestError(
            f"executor_class must be a class that can be imported, not {executor_class!r}",
            param="executor_class",
        )
    name = f"{executor_class.__module__}:{executor_class.__qualname__}"
    return msgspec.structs.replace(config, executor_class=name)
