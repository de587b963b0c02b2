"""Arrays on the wire: their bytes travel as frames of their own, without a copy.

`Array` says what the bytes are, in torch's names for types, so that neither torch nor NumPy is
needed here. In a msgpack message it is `(dtype, shape, n)`, where n is the frame with its bytes
(the message itself is frame 0). Small arrays are inline, as msgpack extension 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

ITEM_BYTES: Final = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip
_FORMATS: Final = {
    "float32": "f", "float64": "d", "float16": "e", "int64": "q", "int32": "i", "int16": "h",
    "uint8": "B", "bool": "?",
}  # fmt: skip
INLINE_BYTES: Final = 256
"""Smaller arrays are inline, because a frame would cost more."""
INLINE_EXTENSION: Final = 3
MAX_FRAMES: Final = 64
"""Limit on the frames of one message, including the message itself. Further arrays are inline,
however large."""
MAX_DIMENSIONS: Final = 8

Frame = bytes | bytearray | memoryview
T = TypeVar("T")
C = TypeVar("C")


class Array:
    """Bytes with a shape, in C order; immutable."""

    # No dataclass: msgspec would encode it by itself as one.
    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: Frame) -> None:
        """`dtype` is a key of `ITEM_BYTES`.

        Raises `ValueError` unless the number of bytes fits type and shape.
        """
        size = ITEM_BYTES.get(dtype)
        if size is None:
            raise ValueError(f"array of type {dtype!r}, not one of {', '.join(ITEM_BYTES)}")
        if len(shape) > MAX_DIMENSIONS or any(length < 0 for length in shape):
            raise ValueError(f"array of shape {shape}")
        given = memoryview(data).nbytes
        if math.prod(shape) * size != given:
            raise ValueError(f"{given} bytes are no {dtype} array of shape {shape}")
        self.dtype: Final = dtype
        self.shape: Final = shape
        self.data: Final = data

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Array)
            and (self.dtype, self.shape) == (other.dtype, other.shape)
            and memoryview(self.data).cast("B") == memoryview(other.data).cast("B")
        )

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape))

    def tolist(self) -> Any:
        """Return nested lists of Python numbers. Raises `ValueError` for bfloat16,
        which has none."""
        flat: Any = memoryview(self.data).cast("B")
        return _nest(flat.cast(self._format()).tolist(), self.shape)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Lets `numpy.asarray` make a read-only array of the same bytes.

        Raises `ValueError` for bfloat16, which NumPy does not have.
        """
        kind = {"B": "|u1", "?": "|b1"}.get(self._format())
        kind = kind or f"{'<i' if self.dtype[0] == 'i' else '<f'}{ITEM_BYTES[self.dtype]}"
        data = memoryview(self.data).cast("B").toreadonly()
        return {"version": 3, "shape": self.shape, "typestr": kind, "data": data}

    def _format(self) -> str:
        item = _FORMATS.get(self.dtype)
        if item is None:
            raise ValueError(f"{self.dtype} has no Python number; convert it to float32 first")
        return item


def _nest(flat: list[Any], shape: tuple[int, ...]) -> Any:
    """Group a flat list from the innermost dimension outwards."""
    if not shape:
        return flat[0]
    for length in reversed(shape[1:]):
        count = len(flat) // length if length else 0
        flat = [flat[i * length : (i + 1) * length] for i in range(count)]
    return flat


class FrameEncoder:
    """Encodes messages to frames. Not for use by two threads at once."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._put)

    def encode(self, message: Any) -> list[Frame]:
        """Return the msgpack message, followed by the bytes of its larger arrays."""
        frames: list[Frame] = [b""]
        self._frames = frames
        frames[0] = self._encoder.encode(message)
        return frames

    def _put(self, value: Any) -> Any:
        if not isinstance(value, Array):
            raise TypeError(f"a {type(value).__name__} cannot be sent")
        data = memoryview(value.data).cast("B")
        if data.nbytes < INLINE_BYTES or len(self._frames) == MAX_FRAMES:
            return value.dtype, value.shape, msgspec.msgpack.Ext(INLINE_EXTENSION, bytes(data))
        self._frames.append(data)
        return value.dtype, value.shape, len(self._frames) - 1


class FrameDecoder(Generic[T]):
    """Decodes frames to messages of one type. Not for use by two threads at once."""

    def __init__(self, kind: type[T]) -> None:
        self._frames: Sequence[Frame] = ()
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=self._take, ext_hook=_inline)

    def decode(self, frames: Sequence[Frame]) -> T:
        """Raises one of `UNREADABLE` for anything malformed."""
        if not 0 < len(frames) <= MAX_FRAMES:
            raise msgspec.ValidationError(f"a message of {len(frames)} frames")
        self._frames = frames
        return self._decoder.decode(frames[0])

    def convert(self, value: Any, kind: type[C]) -> C:
        """Convert a part of the newest message whose type was open to a `kind`.

        Raises `msgspec.ValidationError` if it is none.
        """
        return msgspec.convert(value, kind, dec_hook=self._take)

    def _take(self, kind: type, value: Any) -> Any:
        if kind is not Array:
            raise NotImplementedError(f"no way to decode a {kind}")
        match value:
            case [str(dtype), [*shape], bytes(inline)]:
                data: Frame = inline
            case [str(dtype), [*shape], int(at)] if 0 < at < len(self._frames):
                data = self._frames[at]
            case _:
                raise ValueError("an array must be (dtype, shape, frame or extension 3)")
        if not all(type(length) is int for length in shape):
            raise ValueError("the lengths of an array must be integers")
        return Array(dtype, tuple(shape), data)


def _inline(code: int, data: memoryview) -> bytes:
    if code != INLINE_EXTENSION:
        raise msgspec.ValidationError(f"extension {code} is not known")
    return bytes(data)
