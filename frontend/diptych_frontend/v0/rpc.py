"""What V0's client and its engine told each other, and how an engine core is told the same.

V0 pickled these objects. Here each of them stands for a message of `diptych_protocol.wire`, and an
answer is read from one.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from diptych_frontend.v0.errors import MQEngineDeadError
from diptych_frontend.v0.params import Device
from diptych_protocol import (
    UNREADABLE,
    ControlCall,
    EngineCoreRequestType,
    EngineDescription,
    InvalidRequestError,
    UtilityCall,
    UtilityError,
    UtilityOutput,
    wire,
)
from diptych_protocol.arrays import Frame
from diptych_protocol.as_sent import encode_call
from diptych_protocol.control_calls import (
    ResetMmCache,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    WakeUp,
)

VLLM_RPC_TIMEOUT: Final = 10_000
"""Milliseconds that an engine may take to answer a greeting, and between two heartbeats."""
IPC_INPUT_EXT: Final = ""
"""V0 had four addresses that differed in their ends. Here one socket of the engine core has every
role, so all of them are the address itself."""
IPC_OUTPUT_EXT: Final = ""
IPC_HEALTH_EXT: Final = ""
IPC_DATA_EXT: Final = ""


class RPCStartupRequest(enum.Enum):
    IS_SERVER_READY = 1


@dataclass(frozen=True)
class RPCStartupResponse:
    tracing_enabled: bool
    """The engine tells the stations of requests, of which spans are made."""


class RPCHeartbeatRequest(enum.Enum):
    """Ours: V0's engine sent heartbeats unasked."""

    HOW_ARE_YOU = 1


class RPCUProfileRequest(enum.Enum):
    START_PROFILE = 1
    STOP_PROFILE = 2


class RPCResetMultiModalCacheRequest(enum.Enum):
    RESET = 1


@dataclass(frozen=True)
class RPCResetPrefixCacheRequest:
    device: Device | None = None
    """None: wherever there are blocks."""


@dataclass(frozen=True)
class RPCSleepRequest:
    level: int = 1


@dataclass(frozen=True)
class RPCWakeUpRequest:
    tags: list[str] | None = None


@dataclass(frozen=True)
class RPCAbortRequest:
    request_id: str
    """As the engine core knows it."""


RPC_REQUEST_T = (
    RPCAbortRequest
    | RPCHeartbeatRequest
    | RPCResetMultiModalCacheRequest
    | RPCResetPrefixCacheRequest
    | RPCSleepRequest
    | RPCStartupRequest
    | RPCUProfileRequest
    | RPCWakeUpRequest
)
_call_ids = itertools.count()


def forgets_images(request: RPC_REQUEST_T) -> bool:
    """Whether the client, too, is to forget the images that it prepared."""
    match request:
        case RPCResetMultiModalCacheRequest() | RPCSleepRequest():
            return _control_call(request).forgets_images
    return False


def frames_of(request: RPC_REQUEST_T) -> Sequence[Frame]:
    """The message to an engine core that says what the request says; none if there is nothing to be
    done.

    Raises `InvalidRequestError`, naming the field, for values that mean nothing.
    """
    match request:
        case RPCAbortRequest(request_id):
            return (EngineCoreRequestType.ABORT.value, *wire.encoder.encode([request_id]))
        case RPCStartupRequest():
            return _call("describe", (), answered=True)
        case RPCHeartbeatRequest():
            return _call("stats", (), answered=True)
        case RPCResetPrefixCacheRequest(Device.CPU):
            return ()  # no block is ever swapped out
    call = _checked(_control_call(request))
    return _call(call.METHOD, call.arguments, answered=False)


def _control_call(request: RPC_REQUEST_T) -> ControlCall[Any]:
    match request:
        case RPCUProfileRequest.START_PROFILE:
            return StartProfile()
        case RPCUProfileRequest.STOP_PROFILE:
            return StopProfile()
        case RPCResetMultiModalCacheRequest():
            return ResetMmCache()
        case RPCResetPrefixCacheRequest(device):
            if device not in (None, Device.GPU):
                raise InvalidRequestError(
                    f"device must be a Device or None, not {device!r}", param="device"
                )
            return ResetPrefixCache()
        case RPCSleepRequest(level):
            return Sleep(level)
        case RPCWakeUpRequest(tags):
            return WakeUp(tags)
    raise InvalidRequestError(f"{request!r} is no request to an engine", param="request")


def _checked(call: ControlCall[Any]) -> ControlCall[Any]:
    """Nobody waits for the answer to a one-way call, so the core's refusal would not be heard."""
    for field in msgspec.structs.fields(type(call)):
        try:
            msgspec.convert(getattr(call, field.name), field.type)
        except msgspec.ValidationError as exc:
            raise InvalidRequestError(f"{field.name}: {exc}", param=field.name) from None
    return call


def _call(method: str, args: Sequence[Any], *, answered: bool) -> Sequence[Frame]:
    number = next(_call_ids)
    call = UtilityCall(0, number if answered else ~number, method, list(args))
    return (EngineCoreRequestType.UTILITY.value, *encode_call(call))


def answer_in(frames: Sequence[Frame]) -> UtilityOutput | Exception | None:
    """What a message of an engine core answers; the error if it announces its end; None if it is
    news for everybody.

    Raises `ValueError` if it cannot be read.
    """
    if bytes(frames[0]) == wire.ENGINE_CORE_DEAD:
        return MQEngineDeadError("the engine core has ended")
    try:
        outputs = wire.outputs_decoder.decode(frames)
    except UNREADABLE as exc:
        raise ValueError(f"the message cannot be read: {exc}") from exc
    if outputs.last_words is not None:
        return MQEngineDeadError(f"the engine core has ended: {outputs.last_words}")
    return outputs.utility_output


def failure_in(answer: UtilityOutput) -> UtilityError | None:
    """The error of a call that was refused, or failed in the core."""
    if answer.failure_message is None:
        return None
    return UtilityError(answer.failure_message, param=answer.failure_param)


def startup_response(result: Any) -> Any:
    """What the engine core says of itself as an `RPCStartupResponse`; anything else as it is."""
    try:
        description = msgspec.convert(result, EngineDescription)
    except msgspec.ValidationError:
        return result
    return RPCStartupResponse(description.tracing_enabled)
