"""A request's options about reasoning: `reasoning_ended` and `reasoning_parser_kwargs`."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from diptych_protocol import InvalidRequestError

KWARGS: Final = "reasoning_parser_kwargs"
SWITCHES: Final = ("enable_thinking", "thinking")
"""Names, in templates, of the variable that turns reasoning off."""


class ReasoningParserKwargs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    chat_template_kwargs: Annotated[dict[str, Any], msgspec.Meta(max_length=64)] = {}
    """The variables that the prompt's template was given."""


def parser_kwargs(kwargs: object) -> ReasoningParserKwargs:
    """Return the arguments, checked. Raises `InvalidRequestError` for any other argument."""
    try:
        return msgspec.convert(kwargs, ReasoningParserKwargs)
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:
        known = ", ".join(ReasoningParserKwargs.__struct_fields__)
        raise InvalidRequestError(f"{KWARGS} takes {known}: {exc}", param=KWARGS) from None


def said_ended(reasoning_ended: bool | None, kwargs: object) -> bool | None:
    """Return whether a request says that reasoning has ended before its output; None if it does not
    say.

    Template variables that turn reasoning off say so too. Raises `InvalidRequestError` for invalid
    arguments.
    """
    given = ReasoningParserKwargs() if kwargs is None else parser_kwargs(kwargs)
    if reasoning_ended is not None:
        return reasoning_ended
    off = any(given.chat_template_kwargs.get(switch) is False for switch in SWITCHES)
    return True if off else None


def check_options(reasoning_parser: str, reasoning_ended: bool | None, kwargs: object) -> None:
    """Raise `InvalidRequestError` for options that mean nothing with the engine's setting."""
    if reasoning_ended is not False and kwargs is None:
        return  # nothing that needs a meaning
    said_ended(reasoning_ended, kwargs)
    if reasoning_parser != "none":
        return
    for field, asked in (
        ("reasoning_ended", reasoning_ended is False),
        (KWARGS, kwargs is not None),
    ):
        if asked:
            raise InvalidRequestError(
                f"{field} needs an engine whose reasoning_parser is set: this one knows no "
                "reasoning",
                param=field,
            )
