"""The features of images, and their positions among a step's tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.models.wire_arrays import as_tensor
from diptych_engine.scheduling.images import ImageWork
from diptych_engine.scheduling.request import ScheduledRequest

Rows = NDArray[np.int64]
Encode = Callable[[Tensor], Tensor]
"""[tiles, 3, edge, edge] uint8 -> [features, hidden]."""


class EncodedImages:
    """Holds the features that the scheduler's `EncoderCache` has planned."""

    def __init__(self, encode: Encode | None) -> None:
        """`encode`: the model's; None for a model without vision."""
        self._encode = encode
        self._features: dict[str, Tensor] = {}

    def do(self, work: ImageWork) -> None:
        """Forget features, then encode images."""
        for key in work.forget:
            del self._features[key]
        for image in work.encode:
            if self._encode is None or image.tiles is None:
                raise RuntimeError(f"there is nothing to encode image {image.key} with, or from")
            self._features[image.key] = self._encode(as_tensor(image.tiles))

    def forget(self) -> None:
        """Forget all images."""
        self._features.clear()

    def among(
        self, shares: Sequence[ScheduledRequest], query_starts: NDArray[np.int64]
    ) -> Iterator[tuple[Rows, Tensor]]:
        """Return rows among a step's tokens, and the features for them.

        query_starts: [shares + 1]: where each share begins among the step's tokens.
        """
        for share, begin in zip(shares, query_starts, strict=False):
            start, end = share.start, share.start + share.num_tokens
            for image in share.request.images:
                low, high = bisect_left(image.places, start), bisect_left(image.places, end)
                if low < high:
                    places = np.array(image.places[low:high], np.int64)
                    yield places - start + begin, self._features[image.key][low:high]
