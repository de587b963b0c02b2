"""The errors of V0's client."""

from __future__ import annotations

from diptych_protocol import ClientClosedError, EngineDeadError

MQClientClosedError = ClientClosedError
"""The error of every call after `close`, under V0's name."""


class MQEngineDeadError(EngineDeadError, RuntimeError):
    """The engine is not running any more. In V0 this is a `RuntimeError`."""


def ENGINE_DEAD_ERROR(error: BaseException | None = None) -> MQEngineDeadError:
    """What those who wait for a dead engine get; `error` is the first thing that went wrong."""
    if error is None:
        return MQEngineDeadError("the engine is not running any more")
    dead = MQEngineDeadError(f"the engine is not running any more; the first error: {error!r}")
    dead.__cause__ = error
    return dead
