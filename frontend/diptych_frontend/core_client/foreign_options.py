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
    if not isinstance(executor_class, type):
        raise _unnamed(executor_class, "executor_class")
    return msgspec.structs.replace(
        config, executor_class=importable_name(executor_class, "executor_class")
    )


def importable_name(thing: object, param: str) -> str:
    """`module:name` of a class or function, by which another process can import it.

    Raises `InvalidRequestError`, with `param`, for a lambda, for what was made in a function, and
    for what stands in the program itself: none of them can be imported.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "<")
    if not isinstance(module, str) or module == "__main__" or "<" in name:
        raise _unnamed(thing, param)
    return f"{module}:{name}"


def _unnamed(thing: object, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} must be something that can be imported from a module, not {thing!r}", param=param
    )
