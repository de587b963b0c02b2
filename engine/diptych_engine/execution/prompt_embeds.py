"""Embeddings that replace those of tokens: prompts that are embeddings, and images."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.models.interface import CausalLM, GivenEmbeddings
from diptych_engine.models.wire_arrays import as_tensor
from diptych_engine.scheduling.images import ImageWork
from diptych_engine.scheduling.request import ScheduledRequest, StepPlan
from diptych_protocol import Array

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


class PromptEmbeds:
    """The embeddings of all requests in the batch that brought some; false if there are none."""

    def __init__(self, model: CausalLM, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype` and `device`: the model's."""
        self.images = EncodedImages(model.encode_images)
        self._dtype = dtype
        self._device = device
        self._of: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def admit(self, request_id: str, embeds: Array) -> None:
        self._of[request_id] = as_tensor(embeds)

    def release(self, request_id: str) -> None:
        """Forget a request; ignored for one without embeddings."""
        self._of.pop(request_id, None)

    def methods(self) -> dict[str, Callable[..., Any]]:
        """The methods for `collective_rpc`, but not for clients."""
        return {"_forget_images": self.images.forget}

    def among(
        self, plan: StepPlan, shares: Sequence[ScheduledRequest], query_starts: NDArray[np.int64]
    ) -> GivenEmbeddings | None:
        """Return the rows for a step's tokens; None if all of those are plain tokens.

        shares: those of the plan, in the order of their tokens. query_starts: [shares + 1]: where
        each share begins among the step's tokens.
        """
        rows: list[NDArray[np.int64]] = []
        values: list[Tensor] = []
        if plan.images is not None:
            for places, features in self.images.among(shares, query_starts):
                rows.append(places)
                values.append(features)
        for share, first in zip(shares, query_starts, strict=False):
            embeds = self._of.get(share.request.request_id)
            if embeds is not None and share.start < len(embeds):
                value = embeds[share.start : share.start + share.num_tokens]
                rows.append(np.arange(first, first + len(value)))
                values.append(value.to(self._device, self._dtype))
        if not rows:
            return None
        given = torch.from_numpy(np.concatenate(rows)).to(self._device)
        return GivenEmbeddings(given, torch.cat(values))
