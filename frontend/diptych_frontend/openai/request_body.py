"""Reading what the routes have in common: a JSON body, and prompts in its four forms."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.types import Scope

from diptych_frontend.openai.asgi import header
from diptych_frontend.openai.errors import from_decode_error
from diptych_protocol import InvalidRequestError

T = TypeVar("T")


def decode_body(scope: Scope, body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises `InvalidRequestError` for another content type, and for what does not decode."""
    content_type = header(scope, b"content-type") or ""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequestError(
            f"send the body as 'Content-Type: application/json', not {content_type[:100]!r}",
            param="Content-Type",
            status=415,
        )
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise from_decode_error(exc) from exc


def split_prompts(prompt: str | list[str | int | list[int]], field: str) -> list[str | list[int]]:
    """One text, one list of token ids, or a list of either, as a list of prompts.

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
