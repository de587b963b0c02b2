"""Checks a caller's request by encoding and decoding it as on the wire.

Code that accepts requests from callers does this first. So all types are checked before anything is
computed, and what the wire would refuse is refused here; there is no second table of types. The
result is a copy made of plain values of the declared types, and the caller's objects stay as they
are.

It takes some microseconds per request. The prompt, which the renderer checks, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Final, TypeVar

import msgspec

from diptych_protocol import wire
from diptych_protocol.arrays import FrameDecoder
from diptych_protocol.errors import InvalidRequestError
from diptych_protocol.multimodal import MultiModalFeatureSpec
from diptych_protocol.sampling import PoolingParams, SamplingParams
from diptych_protocol.wire import EngineCoreRequest, UtilityCall

MAX_REQUEST_BYTES: Final = 8 << 20
"""Limit, in bytes, of a request without its prompt. It keeps every message of the request well
below the limit of the wire."""

_UNSENDABLE: Final = (
    msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError, AttributeError,
)  # fmt: skip
"""What encoding and decoding raise for values that are not what their field declares."""
PARAM_NAMES: Final[dict[type, str]] = {
    SamplingParams: "sampling_params",
    PoolingParams: "pooling_params",
}
_params_decoders: Final = {kind: FrameDecoder[Any](kind) for kind in PARAM_NAMES}
Params = TypeVar("Params", SamplingParams, PoolingParams)


class MistypedIdError(InvalidRequestError, TypeError):
    """The id of a request is not a string. Callers that know vLLM may catch it as a `TypeError`."""


def check_id(request_id: object) -> None:
    """Raise `MistypedIdError` unless this is a valid id of a request."""
    if not isinstance(request_id, str):
        kind = type(request_id)
        raise MistypedIdError(f"request_id must be a string, got {kind}", param="request_id")


def check_whole(prompt: object) -> None:
    """Raise `InvalidRequestError` for a request made elsewhere that is only a piece of a prompt:
    nobody would send the next piece, and its caller would wait for ever."""
    if isinstance(prompt, EngineCoreRequest) and prompt.resumable is not False:
        raise InvalidRequestError(
            "a prompt in pieces is an async generator; send no resumable request", param="resumable"
        )


def ids_of(request_ids: object) -> list[str]:
    """Return one id or several as a list. Raises `MistypedIdError` for anything else."""
    if isinstance(request_ids, str):
        return [request_ids]
    if not isinstance(request_ids, Iterable):
        check_id(request_ids)
        return []
    ids = list(request_ids)
    for request_id in ids:
        check_id(request_id)
    return ids


def request_as_sent(request: EngineCoreRequest) -> EngineCoreRequest:
    """Return the request with the declared types of its fields. Its prompt and the tiles of its
    images are kept as they are.

    Raises `InvalidRequestError`, naming the field, for values of other types, for integers beyond
    64 bits, and for more than a message can carry.
    """
    rest = msgspec.structs.replace(
        request,
        prompt_token_ids=None,
        prompt_embeds=None,
        mm_features=None if request.mm_features is None else _without_data(request.mm_features),
    )
    sent: EngineCoreRequest = _round_trip(rest, wire.request_decoder)
    sent.prompt_token_ids, sent.prompt_embeds = request.prompt_token_ids, request.prompt_embeds
    sent.mm_features = request.mm_features
    return sent


def _without_data(features: Any) -> Any:
    """Features without their tiles; anything else as it is."""
    if not isinstance(features, list):
        return features
    return [
        msgspec.structs.replace(feature, data=None)
        if isinstance(feature, MultiModalFeatureSpec)
        else feature
        for feature in features
    ]


def params_as_sent(params: object, kind: type[Params]) -> Params:
    """Return the parameters, which must be of this kind, with the declared types of their
    fields. Fields of a subclass are refused unless they have their defaults. Raises as
    `request_as_sent`."""
    if not isinstance(params, kind):
        name = PARAM_NAMES[kind]
        raise InvalidRequestError(
            f"{name} must be {kind.__name__}, not {type(params).__name__}", param=name
        )
    sent: Params = _round_trip(params, _params_decoders[kind])
    return sent


def encode_call(call: UtilityCall) -> list[Any]:
    """Return the frames of a utility call. Raises `InvalidRequestError` for arguments that cannot
    be sent."""
    try:
        frames = wire.encoder.encode(call)
    except _UNSENDABLE as exc:
        raise InvalidRequestError(f"{call.method}: {_reason(exc)}", param="args") from exc
    if max(map(len, frames)) > wire.MAX_MESSAGE_BYTES:
        raise InvalidRequestError(
            f"{call.method}: more than {wire.MAX_MESSAGE_BYTES} bytes", param="args"
        )
    return frames


def _round_trip(message: msgspec.Struct, decoder: FrameDecoder[Any]) -> Any:
    try:
        frames = wire.encoder.encode(message)
        size = sum(map(len, frames))
        if size <= MAX_REQUEST_BYTES:
            return decoder.decode(frames)
    except _UNSENDABLE as exc:
        field, cause = _culprit(message) or (None, exc)
        where = f"{field}: " if field else ""
        raise InvalidRequestError(f"{where}{_reason(cause)}", param=field) from exc
    raise InvalidRequestError(
        f"the request has {size} bytes besides its prompt; at most {MAX_REQUEST_BYTES} are taken",
        param=max(_decoders_of(type(message)), key=lambda name: _size(getattr(message, name))),
    )


def _culprit(message: msgspec.Struct) -> tuple[str, Exception] | None:
    """The first field, however deep, whose value is not what it declares, and why."""
    for name, decoder in _decoders_of(type(message)).items():
        try:
            decoder.decode(wire.encoder.encode(getattr(message, name)))
        except _UNSENDABLE as exc:
            value = getattr(message, name, None)
            if isinstance(value, (SamplingParams, PoolingParams)):
                return _culprit(value) or (name, exc)
            if name == "extra_args" and isinstance(value, dict) and "kv_transfer_params" in value:
                return "kv_transfer_params", exc
            return name, exc
    return None


@cache
def _decoders_of(kind: type) -> dict[str, FrameDecoder[Any]]:
    return {field.name: FrameDecoder(field.type) for field in msgspec.structs.fields(kind)}


def _size(value: Any) -> int:
    return sum(map(len, wire.encoder.encode(value)))


def _reason(exc: Exception) -> str:
    match exc:
        case RecursionError():
            return "nested too deeply"
        case OverflowError():
            return "an integer beyond 64 bits"
        case UnicodeEncodeError():
            return "the text holds a lone surrogate, which is not a character"
        case msgspec.MsgspecError():
            return str(exc)[:1].lower() + str(exc)[1:]
    return f"{exc}; use plain values: None, bool, int, float, str, list and dict"
