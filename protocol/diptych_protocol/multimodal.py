"""The images of a request, in structs named as in vLLM's messages."""

from __future__ import annotations

from typing import Final

import msgspec

from diptych_protocol.arrays import Array

IMAGE: Final = "image"
"""The only modality."""


class PlaceholderRange(msgspec.Struct, array_like=True, frozen=True):
    """The part of the prompt that an image was expanded to, including the markers
    around its tiles."""

    offset: int
    """The position of its first token in the prompt."""
    length: int


class MultiModalFeatureSpec(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One image of a prompt. The model's image tokens within its range take its features."""

    data: Array | None
    """[tiles, 3, edge, edge] uint8: its tiles, in the order of the prompt; None: the core has an
    image of this identifier already."""
    modality: str
    identifier: str
    """A digest of the data; see `diptych_frontend.images.features.content_hash`."""
    mm_position: PlaceholderRange
    mm_hash: str | None = None
    """The same as the identifier, or None."""


class MultiModalCacheStats(msgspec.Struct, frozen=True):
    """Counts of a front-end's cache of prepared images, since its start."""

    requests: int = 0
    """Prompts with images."""
    queries: int = 0
    """Images."""
    hits: int = 0
    """Images that were found in the cache."""
    reset: bool = False
    """Whether the cache was cleared since the last report."""
