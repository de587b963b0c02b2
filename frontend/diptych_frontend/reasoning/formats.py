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
"""How many tokens at the end of a prompt are looked at for a marker that the template wrote."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How models of one kind mark their reasoning."""

    opener: str
    """What an output begins with if it begins with reasoning."""
    markers: tuple[str, ...]
    """What the splitter must find in the text, although it may be special tokens."""
    splitter: Callable[[bool | None], Splitter]
    """A splitter for one output; takes whether reasoning has ended before it, None if the output
    will show that."""
    ended_in_prompt: Callable[[str], bool | None]
    """Whether the last text of a prompt says that reasoning has ended; None if it does not say.

    Only the very end counts: elsewhere a user may have written what looks like a marker.
    """
    call_splitter: Callable[[bool | None], Splitter] | None = None
    """A splitter that leaves calls of tools in the answer, if `splitter` does not."""


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
    """Whether reasoning has ended before an output: what its request says, or else its prompt."""
    return style.ended_in_prompt(prompt_tail()) if said is None else said


def format_of(reasoning_parser: str) -> ReasoningFormat | None:
    """The format that the setting names; None for `none`."""
    return FORMATS.get(reasoning_parser)
