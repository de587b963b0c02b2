"""Judges JSON that others wrote before it is decoded: while a decoder works, no other thread runs.

A decoder takes about 30 ns for most values, and 150 ns for names of members. Numbers that it cannot
convert at once take up to 0.4 us (9007199254740993.0, 1e23), 28 us with 700 digits, and 50 us with
exponents of three digits (1e300).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

CHEAP_BYTES: Final = 2 << 10
"""What is not larger is cheap, whatever it holds."""
MAX_VALUES: Final = 1 << 17
"""Decoding this many values takes 4 ms."""
MAX_NAMES: Final = 1 << 15
"""Decoding this many members of objects takes 5 ms."""
MAX_DIGITS: Final = 1 << 16
"""Decoding numbers with so many digits takes 3 ms, if only those of 16 digits and more count, an
exponent of two digits, as small numbers have, counts as 16, and a longer one, as 256."""

_LONG: Final = 16
_LONG_EXPONENT: Final = 256
_PIECE: Final = 64 << 10
_DIGITS: Final = bytes.maketrans(b"123456789.+-E", b"0000000000eee")
"""A sign becomes an `e`; only one that belongs to an exponent stands behind an `e`."""


class DearJsonError(msgspec.DecodeError):
    """Decoding it might take long, and is not tried."""


def check_json_cost(data: bytes, max_values: int = MAX_VALUES) -> None:
    """Raise `DearJsonError` for JSON that may take more than a few milliseconds to decode."""
    if len(data) <= CHEAP_BYTES:
        return
    # Those within texts are counted as well: a text with so many has more tokens than the context.
    if sum(map(data.count, (b",", b"[", b"{"))) > max_values:
        raise DearJsonError(
            f"more than {max_values} commas and brackets; send a long prompt as text, and several "
            "prompts in several requests"
        )
    if _is_cheap(data):
        return
    outside = _outside_texts(data)
    if not _is_cheap(outside):
        raise DearJsonError(
            f"more than {MAX_NAMES} members of objects, more than {MAX_DIGITS // _LONG_EXPONENT} "
            f"numbers with exponents of three digits or {MAX_DIGITS // _LONG} with shorter, or "
            f"numbers of {_LONG} digits and more with together more than {MAX_DIGITS} digits"
        )


def _is_cheap(data: bytes) -> bool:
    """Whether there are few names and long numbers, if all of it is outside of texts."""
    if data.count(b":") > MAX_NAMES:
        return False
    digits = 0
    for piece in _pieces(data):
        shape = piece.translate(_DIGITS)
        exponents = shape.count(b"0e00") + shape.count(b"ee00")
        long_ones = shape.count(b"0e000") + shape.count(b"ee000")
        digits += (shape.count(b"0" * _LONG) + exponents) * _LONG
        digits += long_ones * (_LONG_EXPONENT - _LONG)
    return digits <= MAX_DIGITS


def _outside_texts(data: bytes) -> bytes:
    """Return what is not between quotes; behind the first fault of invalid JSON, anything."""
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside: list[bytes] = []
    is_text = False
    for piece in _pieces(data):
        parts = piece.split(b'"')
        outside += parts[is_text::2]
        is_text ^= len(parts) % 2 == 0
    return b"".join(outside)


def _pieces(data: bytes) -> Iterator[bytes]:
    """Between pieces other threads may run."""
    return (data[begin : begin + _PIECE] for begin in range(0, len(data), _PIECE))
