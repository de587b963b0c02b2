"""Cuts an image into the tiles for a model, as the published image processors do.

An image is resized to a longest edge, then to whole tiles in both directions. If that is more than
one tile, a copy of the whole image, shrunk to one tile, follows them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from diptych_frontend.model_files.vision_config import VisionConfig
from diptych_protocol import Array

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_EDGE: Final = 4096
"""No image is enlarged beyond this, whatever the model's files say."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """One prepared image."""

    pixels: Array
    """[tiles, 3, edge, edge] uint8: row by row, then the copy of the whole, if there is one."""
    rows: int
    columns: int
    """The numbers of columns and rows are 0 for an image that is one tile."""


def cut(image: Image, config: VisionConfig) -> Tiles:
    """Return the tiles of an RGB image."""
    edge = config.image_size
    image = _resized(image, longest(image.size, config.longest_edge), config)
    if not config.splits:
        return _tiles([_resized(image, (edge, edge), config)], 0, 0)
    image = _resized(image, whole_tiles(image.size, edge), config)
    columns, rows = image.width // edge, image.height // edge
    if rows * columns == 1:
        return _tiles([image], 0, 0)
    parts = [
        image.crop((column * edge, row * edge, (column + 1) * edge, (row + 1) * edge))
        for row in range(rows)
        for column in range(columns)
    ]
    return _tiles([*parts, _resized(image, (edge, edge), config)], rows, columns)


def num_tiles(size: tuple[int, int], config: VisionConfig) -> int:
    """Return how many tiles `cut` makes of an image of this width and height."""
    if not config.splits:
        return 1
    width, height = whole_tiles(longest(size, config.longest_edge), config.image_size)
    parts = (width // config.image_size) * (height // config.image_size)
    return parts if parts == 1 else parts + 1


def longest(size: tuple[int, int], edge: int) -> tuple[int, int]:
    """Return (width, height) with about the same ratio, whose longer one is `edge`. The shorter one
    is even, as in the models' training."""
    width, height = size
    ratio = width / height
    if width >= height:
        width, height = edge, _even(int(edge / ratio))
    else:
        width, height = _even(int(edge * ratio)), edge
    width, height = max(width, 1), max(height, 1)
    if max(width, height) <= MAX_EDGE:
        return width, height
    ratio = width / height
    if width >= height:
        return MAX_EDGE, max(int(MAX_EDGE / ratio), 1)
    return max(int(MAX_EDGE * ratio), 1), MAX_EDGE


def whole_tiles(size: tuple[int, int], edge: int) -> tuple[int, int]:
    """Return (width, height), rounded to whole tiles."""
    width, height = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        return width, max(math.ceil(int(width / ratio) / edge), 1) * edge
    height = math.ceil(height / edge) * edge
    return max(math.ceil(int(height * ratio) / edge), 1) * edge, height


def _even(length: int) -> int:
    return length + length % 2


def _resized(image: Image, size: tuple[int, int], config: VisionConfig) -> Image:
    from PIL.Image import Resampling  # here, as in `decoding`

    return image.resize(size, Resampling(config.resample))


def _tiles(parts: list[Image], rows: int, columns: int) -> Tiles:
    import numpy as np

    stacked = np.stack([np.asarray(part) for part in parts]).transpose(0, 3, 1, 2)
    pixels = np.ascontiguousarray(stacked)
    return Tiles(Array("uint8", pixels.shape, pixels.data), rows, columns)
