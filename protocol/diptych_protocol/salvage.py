"""Finds the id of a message that cannot be decoded, so that its sender gets an answer.

A struct that is encoded as an array begins with its id. So the id comes before almost everything
that can be wrong, even if the rest is missing. Only that much of MessagePack is read here, and
nothing raises.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from diptych_protocol.arrays import Frame
from diptych_protocol.wire import EngineCoreRequestType

_ARRAY_HEADS: Final = {0xDC: 3, 0xDD: 5}
"""Type byte -> bytes before the first element."""
_TEXT_LENGTHS: Final = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_INTEGERS: Final = {
    0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip


def asker_of(frames: Sequence[Frame]) -> tuple[str | None, int | None]:
    """Return the id of the request, or that of the call, whose sender waits for an answer to a
    message that cannot be read. Both are None if nobody does."""
    kind, message, *_ = (*frames, b"", b"")
    if kind == EngineCoreRequestType.ADD.value:
        return request_id_of(message), None
    if kind == EngineCoreRequestType.UTILITY.value:
        return None, call_id_of(message)
    return None, None


def request_id_of(message: Frame) -> str | None:
    """Return the id in what should be an `EngineCoreRequest`; None if it has none."""
    data = bytes(message)
    try:
        return _text(data, _first_element(data))
    except (ValueError, IndexError, struct.error):
        return None


def call_id_of(message: Frame) -> int | None:
    """Return the id in what should be a `UtilityCall`, its second field; None if it has none."""
    data = bytes(message)
    try:
        _, after = _integer(data, _first_element(data))
        return _integer(data, after)[0]
    except (ValueError, IndexError, struct.error):
        return None


def _first_element(data: bytes) -> int:
    """Where the first element of an array begins. Raises `ValueError` for anything else."""
    kind = data[0]
    if kind & 0xF0 == 0x90:
        return 1
    if kind not in _ARRAY_HEADS:
        raise ValueError("no array")
    return _ARRAY_HEADS[kind]


def _text(data: bytes, at: int) -> str:
    """Raises `ValueError` unless there is a whole string."""
    kind = data[at]
    at += 1
    if kind & 0xE0 == 0xA0:
        length = kind & 0x1F
    else:
        form = _TEXT_LENGTHS.get(kind, "")
        if not form:
            raise ValueError("no string")
        [length] = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
    if at + length > len(data):
        raise ValueError("a string without its end")
    return data[at : at + length].decode()


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """An integer, and where it ends. Raises `ValueError` if there is none."""
    kind = data[at]
    if kind < 0x80:
        return kind, at + 1
    if kind >= 0xE0:
        return kind - 0x100, at + 1
    form = _INTEGERS.get(kind, "")
    if not form:
        raise ValueError("no integer")
    [value] = struct.unpack_from(form, data, at + 1)
    return value, at + 1 + struct.calcsize(form)
