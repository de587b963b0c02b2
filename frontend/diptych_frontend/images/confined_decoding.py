"""Reads the header of an image, or decodes it and cuts it into tiles, in a process of its own:
`python -m` of this module.

Decoders are large C programs, and anybody can make the files. A header may be as large as a file.
"""

from __future__ import annotations

from typing import Final

import msgspec

from diptych_frontend.confined.processes import ConfinedWork, WorkBounds, WorkFailedError, serve
from diptych_frontend.images.decoding import MAX_IMAGE_BYTES, MAX_PIXELS, decoded, size_in_header
from diptych_frontend.images.features import MAX_IMAGE_BYTES as MAX_TILE_BYTES
from diptych_frontend.images.tiles import Tiles, cut
from diptych_frontend.model_files.vision_config import VisionConfig
from diptych_protocol import Array, InvalidRequestError

BOUNDS: Final = WorkBounds(
    memory_bytes=16 * MAX_PIXELS + (512 << 20),
    seconds=20,
    message_bytes=max(MAX_IMAGE_BYTES, MAX_TILE_BYTES) + (1 << 16),
    idle_seconds=60,
)
"""To turn and convert the largest image takes some four copies of four bytes a pixel."""


class Asked(msgspec.Struct, array_like=True):
    where: str
    config: VisionConfig | None
    """None: only the size is needed."""


class Answered(msgspec.Struct, array_like=True):
    refusal: str | None = None
    size: tuple[int, int] = (0, 0)
    shape: tuple[int, ...] = ()
    rows: int = 0
    columns: int = 0


_work: Final = ConfinedWork("diptych_frontend.images.confined_decoding", BOUNDS)


def size_of(encoded: bytes, where: str) -> tuple[int, int]:
    """Return width and height of an image file without decoding it. Raises as `tiles_of`."""
    answer, _ = _ask(encoded, where, None)
    return answer.size


def tiles_of(encoded: bytes, where: str, config: VisionConfig) -> Tiles:
    """Return the tiles of an image file.

    Raises `InvalidRequestError`, naming `where`, for a file beyond the limits, or of no use.
    """
    answer, pixels = _ask(encoded, where, config)
    return Tiles(Array("uint8", answer.shape, memoryview(pixels)), answer.rows, answer.columns)


def _ask(encoded: bytes, where: str, config: VisionConfig | None) -> tuple[Answered, bytearray]:
    if len(encoded) > MAX_IMAGE_BYTES:
        raise InvalidRequestError(
            f"{where} has {len(encoded)} bytes; at most {MAX_IMAGE_BYTES} are taken", param=where
        )
    asked = msgspec.msgpack.encode(Asked(where, config))
    try:
        head, pixels = _work.ask(asked, encoded)
    except WorkFailedError as exc:
        raise InvalidRequestError(
            f"{where} is an image that cannot be prepared: {exc}; send another", param=where
        ) from exc
    answer = msgspec.msgpack.decode(head, type=Answered)
    if answer.refusal is not None:
        raise InvalidRequestError(answer.refusal, param=where)
    return answer, pixels


def _answer(head: bytearray, encoded: bytearray) -> tuple[bytes, memoryview]:
    asked = msgspec.msgpack.decode(head, type=Asked)
    try:
        if asked.config is None:
            size = size_in_header(bytes(encoded), asked.where)
            return msgspec.msgpack.encode(Answered(None, size)), memoryview(b"")
        tiles = cut(decoded(bytes(encoded), asked.where), asked.config)
    except InvalidRequestError as exc:
        return msgspec.msgpack.encode(Answered(str(exc))), memoryview(b"")
    answer = Answered(None, (0, 0), tiles.pixels.shape, tiles.rows, tiles.columns)
    return msgspec.msgpack.encode(answer), memoryview(tiles.pixels.data).cast("B")


if __name__ == "__main__":
    import PIL.Image  # noqa: F401 - loaded before the bounds are measured

    serve(_answer)
