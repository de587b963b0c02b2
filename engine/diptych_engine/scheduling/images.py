"""The positions of images in a prompt, and their meaning for its KV."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych_protocol import Array
from diptych_protocol.block_hashes import ImageInPrompt


@dataclass(slots=True, frozen=True, eq=False)
class PlacedImage:
    """One image of one prompt."""

    key: str
    """Identifies its features: a digest of its tiles, with the salt of the request."""
    places: array[int]
    """The positions of its image tokens in the prompt, in order: feature i belongs to token i."""
    tiles: Array | None
    """[tiles, 3, edge, edge] uint8; None for a request that is only announced."""
    seen: ImageInPrompt
    """Its part in the hashes of the prompt's blocks."""

    @property
    def first(self) -> int:
        return self.places[0]

    @property
    def end(self) -> int:
        """The position after its last image token."""
        return self.places[-1] + 1

    @property
    def num_features(self) -> int:
        return len(self.places)

    @property
    def num_bytes(self) -> int:
        return 0 if self.tiles is None else memoryview(self.tiles.data).nbytes


@dataclass(slots=True)
class ImageWork:
    """The work on images in a step: forget first, then encode, then use."""

    encode: list[PlacedImage] = field(default_factory=list)
    forget: list[str] = field(default_factory=list)
    """Keys of features to forget."""


def identity_of(cache_salt: str | None, images: Sequence[PlacedImage]) -> str | None:
    """Return the identity of everything besides tokens that a sequence's KV depends on, for one
    with images: which ones and where. Identities from clients' salts begin differently; see
    `cache_identity`."""
    if not images:
        return cache_salt
    return "images:" + json.dumps([cache_salt, [[image.first, image.key] for image in images]])
