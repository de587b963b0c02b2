"""How many threads a model gets of the processors that are there."""

from __future__ import annotations

import math

SPARE_FROM = 3
"""With so many processors one is left to the front-end, the hinge, and the kernel's network work.

A step's threads wait for each other many times, so whoever takes a processor away from one of them
holds up all. With fewer processors a thread less costs more than that."""


def model_threads(processors: float, engines: int = 1) -> int:
    """Threads of each of so many engines, or ranks of one, that share these processors: at least 1.

    `processors` may have a fraction, as a container's limit does.
    """
    whole = math.floor(processors)
    return max(1, (whole - 1 if whole >= SPARE_FROM else whole) // engines)
