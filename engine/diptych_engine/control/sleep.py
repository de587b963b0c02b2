"""Describes what a sleeping engine has in memory.

    level 0     only paused
    level 1     no KV cache; the weights are saved as they are, with all updates (from a GPU in the
                host's memory, otherwise in a file)
    level 2     no KV cache and no weights; they are loaded from the model's source again

Parts can be restored separately. Requests are served again when everything is back.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from diptych_protocol import InvalidRequestError

LEVELS: Final = (0, 1, 2)
TAGS: Final = ("weights", "kv_cache", "scheduling")


class Weights(enum.Enum):
    LOADED = enum.auto()
    ASIDE = enum.auto()
    DROPPED = enum.auto()


@dataclass(slots=True)
class Residency:
    """Where an engine's weights are, and whether it has a KV cache."""

    weights: Weights = Weights.LOADED
    kv_cache: bool = True

    @property
    def complete(self) -> bool:
        return self.kv_cache and self.weights is Weights.LOADED

    @property
    def level(self) -> int:
        """The level of sleep; 0: everything is in memory."""
        if self.weights is Weights.DROPPED:
            return 2
        return 0 if self.complete else 1


def check_level(level: int) -> None:
    """Raise `InvalidRequestError` for a level that does not exist."""
    if level not in LEVELS:
        raise InvalidRequestError(f"level must be 0, 1 or 2, not {level}", param="level")


def check_tags(tags: Sequence[str] | None) -> Sequence[str]:
    """Return the tags; None means all. Raises `InvalidRequestError` for an unknown one."""
    for tag in tags or ():
        if tag not in TAGS:
            raise InvalidRequestError(f"tags are {', '.join(TAGS)}, not {tag!r}", param="tags")
    return TAGS if tags is None else tags
