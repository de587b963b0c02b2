"""The last output of a request that has no answer."""

from __future__ import annotations

from diptych_engine.control.image_intake import MissingImageError
from diptych_engine.execution.grammar_compiler import HopelessFormError
from diptych_protocol import (
    DiptychError,
    EngineCoreOutput,
    EngineOverloadedError,
    FinishReason,
    InvalidRequestError,
    RefusedByEngineError,
)
from diptych_protocol.wire import ErrorKind


def failed(request_id: str, error: DiptychError | str) -> EngineCoreOutput:
    """Return the output for a request that failed or was refused."""
    return EngineCoreOutput(
        request_id,
        [],
        finish_reason=FinishReason.ERROR,
        error=str(error),
        error_kind=_kind_of(error),
        error_param=error.param if isinstance(error, InvalidRequestError) else None,
    )


def aborted(request_id: str) -> EngineCoreOutput:
    """Return the output for a request that was aborted."""
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT)


def _kind_of(error: DiptychError | str) -> ErrorKind:
    match error:
        case HopelessFormError() | RefusedByEngineError():
            return ErrorKind.REFUSED
        case EngineOverloadedError():
            return ErrorKind.OVERLOADED
        case MissingImageError():
            return ErrorKind.MISSING_IMAGE
    return ErrorKind.FAULT
