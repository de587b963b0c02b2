"""A request's options about reasoning: its end, the parser's arguments, and the effort."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

import msgspec

from diptych_protocol import InvalidRequestError

KWARGS: Final = "reasoning_parser_kwargs"
SWITCHES: Final = ("enable_thinking", "thinking")
"""Names, in templates, of the variable that turns reasoning off."""
EFFORT: Final = "reasoning_effort"
"""The name, in templates, of the variable that says how much to reason."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_BEGIN, _END = re.compile(r"\{[%{]"), re.compile(r"[%}]\}")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def effort_variables(template: str | None) -> frozenset[str]:
    """Return the names of the variables by which a chat template is told of an effort.

    The template is only looked at: names in its statements and expressions that are neither quoted
    nor an attribute's.
    """
    code = (_END.split(part, 1)[0] for part in _BEGIN.split(template or "")[1:])
    bare = " ".join(_QUOTED.sub("''", each) for each in code)
    names = (EFFORT, *SWITCHES)
    return frozenset(name for name in names if re.search(rf"(?<![\w.]){name}(?!\w)", bare))


def effort_kwargs(effort: Effort, variables: frozenset[str]) -> dict[str, Any]:
    """Return what to set of these variables, so that a model makes this effort."""
    return {name: effort if name == EFFORT else effort != "none" for name in variables}


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


def check_options(is_separated: bool, reasoning_ended: bool | None, kwargs: object) -> None:
    """Raise `InvalidRequestError` for options that mean nothing to the engine.

    is_separated: whether it tells reasoning from answers.
    """
    said_ended(reasoning_ended, kwargs)
    if is_separated:
        return
    for field, asked in (
        ("reasoning_ended", reasoning_ended is False),
        (KWARGS, kwargs is not None),
    ):
        if asked:
            raise InvalidRequestError(
                f"{field}: this engine tells no reasoning from answers; leave it out, or set the "
                "engine's reasoning_parser to think or harmony",
                param=field,
            )
