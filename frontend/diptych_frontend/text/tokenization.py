"""The options of tokenising one prompt: its `tokenization_kwargs`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from diptych_protocol import InvalidRequestError

PARAM = "tokenization_kwargs"


class Tokenization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options, named as those of Hugging Face's tokenizers. They affect texts only: a prompt of
    token ids is not tokenised."""

    add_special_tokens: bool = True
    """Whether to add the tokens that the model expects at the beginning of a text."""
    truncation: bool = False
    """Whether to keep only the first `max_length` tokens."""
    max_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """None: as many as the model can hold."""


AS_USUAL = Tokenization()
WITHOUT_SPECIAL_TOKENS = Tokenization(add_special_tokens=False)


def tokenization(kwargs: object) -> Tokenization:
    """Parse `tokenization_kwargs`. Raises `InvalidRequestError` for any other argument."""
    if kwargs is None:
        return AS_USUAL
    if not isinstance(kwargs, dict):
        raise InvalidRequestError(f"{PARAM} must be a dict", param=PARAM)
    try:
        wanted = msgspec.convert(kwargs, Tokenization)
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:
        known = ", ".join(Tokenization.__struct_fields__)
        raise InvalidRequestError(f"{PARAM} takes {known}: {exc}", param=PARAM) from None
    if wanted.max_length is not None and not wanted.truncation:
        raise InvalidRequestError(f"{PARAM}: max_length needs truncation=True", param=PARAM)
    return wanted


def cut(token_ids: list[Any], wanted: Tokenization, most: int) -> list[Any]:
    """Return the tokens that are kept; `most` is what the model can hold."""
    return token_ids[: wanted.max_length or most] if wanted.truncation else token_ids
