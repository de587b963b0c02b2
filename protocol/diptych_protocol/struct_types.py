"""Types of messages, made ready before a program has threads."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


def resolve_struct_types() -> None:
    """Look up the annotations of every struct that has been imported; a program does so before it
    starts threads.

    msgspec does it at a struct's first use, and a second thread that decodes the same struct
    meanwhile sees half a description: the process ends with a segmentation fault.
    """
    for struct in _subclasses(msgspec.Struct):
        msgspec.json.Decoder(struct)


def _subclasses(of: type) -> Iterator[type]:
    for subclass in of.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
