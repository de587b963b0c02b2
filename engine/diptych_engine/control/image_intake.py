"""Receives the images of requests: checks them, finds known ones by name, and limits
their memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from diptych_engine.scheduling.images import PlacedImage
from diptych_engine.scheduling.request import Request
from diptych_frontend.chain_memo import ItemCache
from diptych_frontend.images.features import (
    MAX_CACHE_BYTES,
    check_features,
    content_hash,
    require_vision,
)
from diptych_frontend.model_files.vision_config import VisionConfig
from diptych_protocol import (
    Array,
    DiptychError,
    EngineOverloadedError,
    InvalidRequestError,
    MultiModalFeatureSpec,
)
from diptych_protocol.block_hashes import ImageInPrompt, image_key

MAX_WAITING_BYTES: Final = 2 << 30
"""The most bytes of the tiles of all unfinished requests."""


class MissingImageError(DiptychError):
    """A request names an unknown image without its data."""


class ImageIntake:
    """Receives the images of one engine's requests."""

    def __init__(self, vision: VisionConfig | None, capacity: int) -> None:
        """vision: None for a model that takes no images. capacity: tokens of the encoder cache."""
        self._vision = vision
        self._capacity = capacity
        self._received: ItemCache[str, Array] = ItemCache(
            lambda tiles: memoryview(tiles.data).nbytes, MAX_CACHE_BYTES
        )

    @property
    def sees(self) -> bool:
        return self._vision is not None

    def place(
        self,
        features: list[MultiModalFeatureSpec],
        token_ids: Sequence[int],
        cache_salt: str | None,
        *,
        announced: bool,
    ) -> tuple[PlacedImage, ...]:
        """Return the images of a request with their positions.

        cache_salt: requests with different salts share no image.

        announced: the request is still to come; its images may be missing.

        Raises `InvalidRequestError` for images that do not fit the prompt or the model, and
        `MissingImageError` for one that is neither in the message nor known.
        """
        vision = require_vision(self._vision)
        check_features(features, token_ids, vision)
        images = []
        for feature in features:
            place = feature.mm_position
            within = range(place.offset, place.offset + place.length)
            marker = vision.image_token_id
            places = array("q", (at for at in within if token_ids[at] == marker))
            if len(places) > self._capacity:
                raise InvalidRequestError(
                    f"an image of {len(places)} tokens does not fit in encoder_cache_tokens, "
                    f"{self._capacity}; send a smaller one, or raise the setting",
                    param="mm_features",
                )
            tiles = self._tiles(feature, announced=announced)
            # What its name stands for need not be what came with it.
            if tiles is not None and tiles.shape[0] * vision.tokens_per_tile != len(places):
                raise InvalidRequestError(
                    f"mm_features: the prompt has {len(places)} image tokens for the "
                    f"{tiles.shape[0]} tiles of image {feature.identifier}",
                    param="mm_features",
                )
            key = image_key(feature.identifier, cache_salt)
            seen = ImageInPrompt(key, within.start, within.stop)
            images.append(PlacedImage(key, places, tiles, seen))
        return tuple(images)

    def require_room(self, request: Request, others: Iterable[Request]) -> None:
        """Raise `EngineOverloadedError` if the tiles of a request exceed the limit together with
        those of all others."""
        held = sum(image.num_bytes for other in others for image in other.images)
        if held and held + sum(image.num_bytes for image in request.images) > MAX_WAITING_BYTES:
            raise EngineOverloadedError("overloaded: too many images wait already")

    def forget(self) -> int:
        """Forget known images; present requests keep theirs. Returns how many were forgotten."""
        count = len(self._received)
        self._received.clear()
        return count

    def _tiles(self, feature: MultiModalFeatureSpec, *, announced: bool) -> Array | None:
        """An image's tiles: a name stands for them only if it is a digest of them."""
        name, given = feature.identifier, feature.data
        known = self._received.get(name)
        if known is not None:
            return known
        if given is None:
            if announced:
                return None
            raise MissingImageError(f"the image {name} is not here; send it with its data")
        if content_hash(given) != name:
            raise InvalidRequestError(
                f"mm_features: the identifier {name} is not the digest of its data",
                param="mm_features",
            )
        self._received.put(name, given)
        return given
