"""Threads: how many a model gets of the processors, and what a program does before it has any."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import msgspec

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


def resolve_struct_types() -> None:
    """Look up the annotations of every struct that has been imported; a program does so before it
    starts threads.

    msgspec does it at a struct's first use, and a second thread that decodes the same struct
    meanwhile sees half a description: the process ends with a segmentation fault.
    """
    for struct in _subclasses(msgspec.Struct):
        # One that cannot be decoded, for what it holds never leaves its process, never is.
        with contextlib.suppress(TypeError, NameError):
            msgspec.json.Decoder(struct)


def _subclasses(of: type) -> Iterator[type]:
    direct: list[type] = of.__subclasses__()
    for subclass in direct:
        yield subclass
        yield from _subclasses(subclass)
