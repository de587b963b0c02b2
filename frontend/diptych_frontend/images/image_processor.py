"""Prepares a model's images once, and puts them in their places among the tokens of a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

from diptych_frontend.chain_memo import ItemCache
from diptych_frontend.images.confined_decoding import size_of, tiles_of
from diptych_frontend.images.decoding import MAX_PIXELS, GivenImage
from diptych_frontend.images.features import MAX_CACHE_BYTES, MAX_IMAGES, content_hash
from diptych_frontend.images.tiles import Tiles, cut, num_tiles
from diptych_frontend.model_files.vision_config import VisionConfig
from diptych_protocol import InvalidRequestError
from diptych_protocol.multimodal import (
    IMAGE,
    MultiModalCacheStats,
    MultiModalFeatureSpec,
    PlaceholderRange,
)

MAX_PROMPT_PIXELS: Final = 4 * MAX_PIXELS
"""The most pixels of all images of a prompt. They are decoded one by one, in a second or two."""
AROUND: Final = "<fake_token_around_image>"
GLOBAL: Final = "<global-img>"
"""Markers that the published processors write as text."""

Encode = Callable[[str], list[int]]
"""A function from a text to token ids, without those that begin a prompt."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An image's tiles and name."""

    tiles: Tiles
    name: str
    size: tuple[int, int]
    """Width and height from its file's header."""


class ImageProcessor:
    """Prepares the images of one model. Safe to use from several threads."""

    def __init__(self, config: VisionConfig, max_tokens: int) -> None:
        """max_tokens: the length of the model's context."""
        self.config = config
        self._max_tokens = max_tokens
        self._prepared: ItemCache[str, Prepared] = ItemCache(_num_bytes, MAX_CACHE_BYTES)
        self._lock = Lock()
        self._requests = self._queries = self._hits = 0
        self._reset = False

    def place(
        self, token_ids: list[int], images: Sequence[GivenImage], encode: Encode, where: str
    ) -> tuple[list[int], list[MultiModalFeatureSpec]]:
        """Replace each image token of a prompt, one per image, by as many tokens as its tiles need.

        where: the field of the request that has the prompt.

        Raises `InvalidRequestError` if the prompt has another number of image tokens, and for an
        image that cannot be read.
        """
        marker = self.config.image_token_id
        found = token_ids.count(marker)
        if found != len(images):
            raise InvalidRequestError(
                f"the prompt has {found} image tokens for {len(images)} images; each image needs "
                "one, and texts must not have others",
                param=where,
            )
        if len(images) > MAX_IMAGES:
            raise InvalidRequestError(
                f"{len(images)} images; at most {MAX_IMAGES} are taken", param=where
            )
        sizes = [self._size_of(image) for image in images]
        self._judge(sizes, len(token_ids), where)
        prepared = self._prepare(images, sizes)
        expanded: list[int] = []
        features: list[MultiModalFeatureSpec] = []
        for token in token_ids:
            if token != marker:
                expanded.append(token)
                continue
            image = prepared[len(features)]
            tokens = self._expansion(image.tiles, encode)
            place = PlaceholderRange(len(expanded), len(tokens))
            features.append(
                MultiModalFeatureSpec(image.tiles.pixels, IMAGE, image.name, place, image.name)
            )
            expanded += tokens
        return expanded, features

    def stat(self) -> MultiModalCacheStats:
        """Return totals since the start, and whether `clear` was called since the last `stat`."""
        with self._lock:
            reset, self._reset = self._reset, False
            return MultiModalCacheStats(self._requests, self._queries, self._hits, reset)

    def clear(self) -> None:
        """Forget all prepared images."""
        self._prepared.clear()
        with self._lock:
            self._reset = True

    def _size_of(self, image: GivenImage) -> tuple[int, int]:
        content = image.content
        if not isinstance(content, bytes):
            return content.size
        known = self._prepared.get(_key(content))
        return size_of(content, image.where) if known is None else known.size

    def _judge(self, sizes: Sequence[tuple[int, int]], num_others: int, where: str) -> None:
        """Raise `InvalidRequestError` for what the headers of the images tell already, before
        anything is decoded.

        num_others: the tokens of the prompt before its image tokens are expanded.
        """
        pixels, tokens = 0, num_others
        for size in sizes:
            pixels += size[0] * size[1]
            tokens += num_tiles(size, self.config) * self.config.tokens_per_tile
        if pixels > MAX_PROMPT_PIXELS:
            raise InvalidRequestError(
                f"the images have {pixels} pixels together; at most {MAX_PROMPT_PIXELS} are taken; "
                "send smaller ones, or fewer",
                param=where,
            )
        if tokens > self._max_tokens:
            raise InvalidRequestError(
                f"the prompt has {tokens} tokens with those of its images, more than this model "
                f"can hold, {self._max_tokens}; send fewer images",
                param=where,
                code="context_length_exceeded",
            )

    def _prepare(
        self, images: Sequence[GivenImage], sizes: Sequence[tuple[int, int]]
    ) -> list[Prepared]:
        prepared, hits = [], 0
        for image, size in zip(images, sizes, strict=True):
            content = image.content
            if not isinstance(content, bytes):
                prepared.append(_named(cut(content, self.config), size))
                continue
            key = _key(content)
            known = self._prepared.get(key)
            hits += known is not None
            if known is None:
                known = _named(tiles_of(content, image.where, self.config), size)
                self._prepared.put(key, known)
            prepared.append(known)
        with self._lock:
            self._requests += bool(images)
            self._queries += len(images)
            self._hits += hits
        return prepared

    def _expansion(self, tiles: Tiles, encode: Encode) -> list[int]:
        """The tokens of an image: its tiles' rows and columns, then the whole, between markers."""
        image = [self.config.image_token_id] * self.config.tokens_per_tile
        tokens: list[int] = []
        for row in range(1, tiles.rows + 1):
            for column in range(1, tiles.columns + 1):
                tokens += encode(f"{AROUND}<row_{row}_col_{column}>") + image
            tokens += encode("\n") if row < tiles.rows else []
        before = "\n\n" if tiles.rows else ""
        return [*tokens, *encode(f"{before}{AROUND}{GLOBAL}"), *image, *encode(AROUND)]


def _key(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _named(tiles: Tiles, size: tuple[int, int]) -> Prepared:
    return Prepared(tiles, content_hash(tiles.pixels), size)


def _num_bytes(item: Prepared) -> int:
    return memoryview(item.tiles.pixels.data).nbytes
