"""The formats of reasoning by name: the values of the engine's setting `reasoning_parser`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

from diptych_frontend.reasoning import harmony, think
from diptych_frontend.reasoning.splitter import Splitter

PROMPT_TAIL: Final = 32
"""The number of tokens at the end of a prompt that are searched for a marker which the template
wrote."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How models of one kind mark their reasoning."""

    opener: str
    """The beginning of an output that begins with reasoning."""
    markers: tuple[str, ...]
    """The texts that the splitter must find, although they may be special tokens."""
    splitter: Callable[[bool | None], Splitter]
    """Makes a splitter for one output from whether reasoning has ended before it; None: the output
    will show that."""
    ended_in_prompt: Callable[[str], bool | None]
    """Whether the last text of a prompt says that reasoning has ended; None if it does not say.

    Only the very end counts: elsewhere a user may have written what looks like a marker.
    """
    call_splitter: Callable[[bool | None], Splitter] | None = None
    """Makes a splitter that leaves calls of tools in the answer, if `splitter` does not."""


FORMATS: Final[Mapping[str, ReasoningFormat]] = MappingProxyType(
    {
        "think": ReasoningFormat(
            think.OPEN, (think.OPEN, think.CLOSE), think.ThinkSplitter, think.ended_in_prompt
        ),
        "harmony": ReasoningFormat(
            harmony.CHANNEL,
            (*harmony.MARKERS, harmony.CONSTRAIN),
            harmony.HarmonySplitter,
            harmony.ended_in_prompt,
            partial(harmony.HarmonySplitter, shows_calls=True),
        ),
    }
)


def begins_ended(
    style: ReasoningFormat, said: bool | None, prompt_tail: Callable[[], str]
) -> bool | None:
    """Return whether reasoning has ended before an output, by its request or else by its prompt."""
    return style.ended_in_prompt(prompt_tail()) if said is None else said


SIGNS: Final = (("<|channel|>", "harmony"), ("</think>", "think"))
"""Texts that only the chat templates of models that reason contain: where a template leaves out
earlier reasoning, ends it for a request that wants none, or tells the model of it."""


def name_of(reasoning_parser: str, template: str | None) -> str:
    """Return the name of the format for the setting. `auto` finds it in the chat template; a
    template without any sign, or none at all, means `none`."""
    if reasoning_parser != "auto":
        return reasoning_parser
    return next((name for sign, name in SIGNS if sign in (template or "")), "none")


def format_of(reasoning_parser: str, template: str | None) -> ReasoningFormat | None:
    """Return the format for the setting; None if reasoning is not separated."""
    return FORMATS.get(name_of(reasoning_parser, template))
