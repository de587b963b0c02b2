"""The images of a request: their names, and what an engine may assume about them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from diptych_frontend.model_files.vision_config import VisionConfig
from diptych_protocol import Array, InvalidRequestError
from diptych_protocol.multimodal import IMAGE, MultiModalFeatureSpec, PlaceholderRange
from diptych_protocol.wire import MAX_MESSAGE_BYTES

MAX_IMAGES: Final = 32
"""The most images of one prompt."""
MAX_FEATURE_BYTES: Final = 192 << 20
"""The most bytes of all tiles of one prompt."""
MAX_IMAGE_BYTES: Final = MAX_MESSAGE_BYTES
"""The most bytes of the tiles of one image, which is one frame of a message."""
MAX_CACHE_BYTES: Final = 256 << 20
"""The images that a front-end, or a core, keeps for later requests."""
MAX_IDENTIFIER_CHARS: Final = 64
PARAM: Final = "mm_features"


def content_hash(pixels: Array) -> str:
    """Return the name of an image: a digest of its tiles, and so of the options that cut them."""
    content = hashlib.blake2b(f"image {pixels.dtype} {pixels.shape} ".encode(), digest_size=16)
    content.update(pixels.data)
    return content.hexdigest()


def check_features(
    features: object, token_ids: Sequence[int], vision: VisionConfig | None
) -> list[MultiModalFeatureSpec]:
    """Return the features if they fit the prompt and the model. The identifiers are not verified.

    Raises `InvalidRequestError`, naming `mm_features`, for anything else.
    """
    vision = require_vision(vision)
    if not isinstance(features, list) or not 1 <= len(features) <= MAX_IMAGES:
        raise _refusal(f"there must be a list of 1 to {MAX_IMAGES} of them")
    total, covered = 0, 0
    for index, feature in enumerate(features):
        if not isinstance(feature, MultiModalFeatureSpec):
            raise _refusal(f"[{index}] is a {type(feature).__name__}, no MultiModalFeatureSpec")
        covered = _check_place(feature, index, covered, token_ids, vision)
        if feature.data is not None:
            size = memoryview(feature.data.data).nbytes
            if size > MAX_IMAGE_BYTES:
                raise _refusal(f"[{index}] has {size} bytes of tiles, more than {MAX_IMAGE_BYTES}")
            total += size
    if total > MAX_FEATURE_BYTES:
        raise _refusal(f"the images have {total} bytes of tiles, more than {MAX_FEATURE_BYTES}")
    inside = sum(_num_image_tokens(feature, token_ids, vision) for feature in features)
    if list(token_ids).count(vision.image_token_id) != inside:
        raise _refusal("the prompt has image tokens that belong to none of the images")
    if token_ids[-1] == vision.image_token_id:
        raise _refusal("the prompt must not end with an image token")
    return features


def require_vision(vision: VisionConfig | None) -> VisionConfig:
    """Raise `InvalidRequestError` for a model that takes no images."""
    if vision is None:
        raise _refusal("this model takes no images; leave them out")
    return vision


def _check_place(
    feature: MultiModalFeatureSpec,
    index: int,
    covered: int,
    token_ids: Sequence[int],
    vision: VisionConfig,
) -> int:
    """Raise `InvalidRequestError` for a feature that does not fit. Returns where its range ends.

    covered: where the range before it ends.
    """
    if feature.modality != IMAGE:
        raise _refusal(f"[{index}].modality must be {IMAGE!r}, not {str(feature.modality)[:64]!r}")
    name = feature.identifier
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_IDENTIFIER_CHARS:
        raise _refusal(f"[{index}].identifier must have 1 to {MAX_IDENTIFIER_CHARS} characters")
    if feature.mm_hash not in (None, name):
        raise _refusal(f"[{index}].mm_hash must be the same as its identifier")
    place = feature.mm_position
    if not isinstance(place, PlaceholderRange) or not (
        covered <= place.offset < place.offset + place.length <= len(token_ids)
    ):
        raise _refusal(f"[{index}].mm_position lies outside the prompt, or in an earlier image")
    count, per_tile = _num_image_tokens(feature, token_ids, vision), vision.tokens_per_tile
    if not count or count % per_tile:
        raise _refusal(f"[{index}] has {count} image tokens, which is no multiple of {per_tile}")
    if feature.data is not None:
        wanted = (count // per_tile, 3, vision.image_size, vision.image_size)
        given = feature.data
        if not isinstance(given, Array) or (given.dtype, given.shape) != ("uint8", wanted):
            raise _refusal(f"[{index}].data must be uint8 of the shape {list(wanted)}")
    return place.offset + place.length


def _num_image_tokens(
    feature: MultiModalFeatureSpec, token_ids: Sequence[int], vision: VisionConfig
) -> int:
    place = feature.mm_position
    return list(token_ids[place.offset : place.offset + place.length]).count(vision.image_token_id)


def _refusal(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAM}: {why}", param=PARAM)
