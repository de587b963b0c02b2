"""Divides processors among models' threads, and prepares structs before a program
starts threads."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import msgspec

SPARE_FROM = 3
"""From this many processors on, one is left for the front-end, the hinge, and the kernel's network
work.

A step's threads wait for each other many times, so whatever delays one of them delays all. With
fewer processors, one thread less costs more than that.
"""


def model_threads(processors: float, engines: int = 1) -> int:
    """Return the threads of each of this many engines, or ranks of one, that share these
    processors: at least 1.

    `processors` may have a fraction, as a container's limit may.
    """
    whole = math.floor(processors)
    return max(1, (whole - 1 if whole >= SPARE_FROM else whole) // engines)


def resolve_struct_types() -> None:
    """Resolve the annotations of every struct that has been imported. A program does so before it
    starts threads."""
    # msgspec would resolve them at a struct's first use, and a second thread that decodes the same
    # struct meanwhile would see half of them: the process ends with a segmentation fault.
    for struct in _subclasses(msgspec.Struct):
        # One that cannot be decoded, for what it holds never leaves its process, never is.
        with contextlib.suppress(TypeError, NameError):
            msgspec.json.Decoder(struct)


def _subclasses(of: type) -> Iterator[type]:
    direct: list[type] = of.__subclasses__()
    for subclass in direct:
        yield subclass
        yield from _subclasses(subclass)
