"""Reads what the routes have in common: a JSON body, and prompts in their four forms."""

from __future__ import annotations

import gc
from typing import Any, Final, TypeVar

import msgspec
from starlette.types import Scope

from diptych_frontend.confined.json_cost import MAX_VALUES, check_json_cost
from diptych_frontend.openai.errors import from_decode_error
from diptych_frontend.openai.exchange import exchange_of, header
from diptych_frontend.openai.field_rules import leave_out
from diptych_protocol import UNREADABLE, InvalidRequestError

T = TypeVar("T")


def most_values(max_model_len: int) -> int:
    """Return how many values the body of a request may have for a model with this
    context length."""
    return max(MAX_VALUES, 2 * max_model_len)


def decode_body(
    scope: Scope, body: bytes, decoder: msgspec.json.Decoder[T], max_values: int = MAX_VALUES
) -> T:
    """Decode a body. Raises `InvalidRequestError` for another content type, and for an invalid
    body. Fields that have no effect are left out; see `field_rules`."""
    content_type = header(scope, b"content-type") or ""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequestError(
            f"send the body as 'Content-Type: application/json', not {content_type[:100]!r}",
            param="Content-Type",
            status=415,
        )
    try:
        return decode_json(body, decoder, max_values)
    except InvalidRequestError as exc:
        if not isinstance(exc.__cause__, msgspec.ValidationError):
            raise
        raw = decode_json(body, _any, max_values)
        exchange = exchange_of(scope)
        left_out = leave_out(raw, decoder.type, refuses_unknown=exchange.refuses_unknown)
        if not left_out:
            raise
        exchange.ignored_fields = len(left_out)
        if left_out.elsewhere:
            exchange.warn(left_out.elsewhere)
        return decode_json(msgspec.json.encode(raw), decoder, max_values)


_any: Final = msgspec.json.Decoder(Any)


def decode_json(body: bytes, decoder: msgspec.json.Decoder[T], max_values: int = MAX_VALUES) -> T:
    """Decode a body, unless that takes too long (`check_json_cost`).

    Raises `InvalidRequestError`, naming the field, for a body that the decoder rejects.
    """
    large = len(body) > max_values
    if large:
        # What a body is made of refers to nothing: searching it for cycles would take ten times as
        # long as decoding it.
        gc.disable()
    try:
        check_json_cost(body, max_values)
        return decoder.decode(body)
    except UNREADABLE as exc:
        raise from_decode_error(exc) from exc
    finally:
        if large:
            gc.enable()


def split_prompts(prompt: str | list[str | int | list[int]], field: str) -> list[str | list[int]]:
    """Return one text, one list of token ids, or a list of either, as a list of prompts.

    Raises `InvalidRequestError`, naming the field, for an empty or mixed list.
    """
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if not prompt:
        raise InvalidRequestError(f"{field} is an empty list", param=field)
    if len(ids) == len(prompt):
        return [ids]
    if len(texts) == len(prompt):
        return [*texts]
    if len(lists) == len(prompt):
        return [*lists]
    raise InvalidRequestError(
        f"{field} mixes texts, token ids and lists; send one kind", param=field
    )
