"""Where the images of a prompt lie, and what that means for its KV. Pure."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych_protocol import Array


@dataclass(slots=True, frozen=True, eq=False)
class PlacedImage:
    """One image of one prompt."""

    key: str
    """What its features are known by: a digest of its tiles, with the salt of the request."""
    places: array[int]
    """The places of its image tokens in the prompt, in order: feature i belongs to token i."""
    tiles: Array | None
    """[tiles, 3, edge, edge] uint8; None for a request that is only announced."""

    @property
    def first(self) -> int:
        return self.places[0]

    @property
    def end(self) -> int:
        """The place behind its last image token."""
        return self.places[-1] + 1

    @property
    def num_features(self) -> int:
        return len(self.places)

    @property
    def num_bytes(self) -> int:
        return 0 if self.tiles is None else memoryview(self.tiles.data).nbytes


@dataclass(slots=True)
class ImageWork:
    """What a step does for images: forget first, then encode, then use."""

    encode: list[PlacedImage] = field(default_factory=list)
    forget: list[str] = field(default_factory=list)
    """Keys."""


def identity_of(cache_salt: str | None, images: Sequence[PlacedImage]) -> str | None:
    """Names all that a sequence's KV depends on besides its tokens, where it has images: which ones
    and where. A salt of a client's begins otherwise; see `cache_identity`."""
    if not images:
        return cache_salt
    return "images:" + json.dumps([cache_salt, [[image.first, image.key] for image in images]])


def seen_in(images: Sequence[PlacedImage], start: int, end: int) -> bytes:
    """What a block of tokens holds of images: which ones, and where they begin, seen from it."""
    seen = [
        f"{image.key}@{image.first - start};"
        for image in images
        if image.first < end and image.end > start
    ]
    return "".join(seen).encode()
