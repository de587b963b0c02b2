"""Requests to come: when, how long, and what they share."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from diptych.simulator.prefixes import Chain
from diptych_router.choosing.policy import RequestView
from diptych_router.engines.block_holders import Keys
from diptych_router.engines.known_prefixes import BlockNaming

PREFIX_BITS = 24
"""A part of a prompt has fewer blocks than a number of so many bits can count."""
NO_KEYS = np.empty(0, np.uint64)


def prefix_keys(prefix: int, begin: int, end: int) -> Keys:
    """The keys of some of the blocks of a common prefix."""
    return np.arange(begin, end, dtype=np.uint64) + np.uint64((prefix + 1) << PREFIX_BITS)


@dataclass(frozen=True, slots=True)
class Request:
    """One request as its user sends it."""

    arrival: float
    """Seconds."""
    prompt: int
    output: int
    chain: Chain = ()
    """What its prompt begins with, as far as other prompts may begin with it as well."""
    waits: bool = False
    """It is sent when another request has ended, but not before its arrival; such requests are sent
    in order."""
    cached: int = 0
    """Tokens of the prompt that whichever engine computes it is taken to have: what others began
    with is not known."""

    @property
    def view(self) -> RequestView:
        """What a router's policy may know of it."""
        return RequestView(self.prompt - self.cached, keys=self._keys)

    def _keys(self, naming: BlockNaming) -> Keys:
        """The keys of the full blocks that other prompts may begin with as well."""
        ends = [0, *(part.end // naming.block_size for part in self.chain)]
        parts = zip(self.chain, itertools.pairwise(ends), strict=True)
        keys = [prefix_keys(part.key, 0, end - begin) for part, (begin, end) in parts]
        return np.concatenate(keys) if keys else NO_KEYS
