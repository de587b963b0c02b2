"""Turns the hidden states of prompts into the vectors of pooling requests.

A prompt is computed in chunks, so each way of pooling keeps between them just what it needs: the
mean one sum, `token_embed` every row, the last token nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.scheduling.request import ScheduledRequest
from diptych_protocol import Array, PoolingParams


class Pool(Protocol):
    """The kept part of one prompt's hidden states, which are float32 and after the final norm."""

    def add(self, hidden: Tensor) -> None:
        """Add the next tokens, [tokens, hidden]."""

    def result(self) -> Tensor:
        """Return [hidden] or [tokens, hidden]; at least one token must have been added."""


class LastToken:
    def __init__(self) -> None:
        self._last = torch.empty(0)

    def add(self, hidden: Tensor) -> None:
        self._last = hidden[-1]

    def result(self) -> Tensor:
        return self._last


class Mean:
    def __init__(self) -> None:
        self._sum: Tensor | int = 0
        self._count = 0

    def add(self, hidden: Tensor) -> None:
        self._sum = self._sum + hidden.sum(0)
        self._count += len(hidden)

    def result(self) -> Tensor:
        return torch.as_tensor(self._sum / self._count)


class EveryToken:
    def __init__(self) -> None:
        self._pieces: list[Tensor] = []

    def add(self, hidden: Tensor) -> None:
        self._pieces.append(hidden.cpu())

    def result(self) -> Tensor:
        return torch.cat(self._pieces)


EMBEDS: Final[dict[str, Callable[[], Pool]]] = {"last": LastToken, "mean": Mean}
"""The ways of pooling, by `EngineConfig.pooling`."""


@dataclass(slots=True)
class _Prompt:
    """A prompt on its way through the steps."""

    params: PoolingParams
    pool: Pool
    num_tokens: int | None = None
    """The tokens so far; None before its first chunk."""


class Pooler:
    """The prompts of all pooling requests in the batch; false if there are none."""

    def __init__(self, pooling: str) -> None:
        """`pooling` is a key of `EMBEDS`."""
        self._embed = EMBEDS[pooling]
        self._open: dict[str, _Prompt] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def admit(self, request_id: str, params: PoolingParams) -> None:
        """Begin a prompt. One that lost its blocks begins again."""
        pool = EveryToken() if params.task == "token_embed" else self._embed()
        self._open[request_id] = _Prompt(params, pool)

    def release(self, request_id: str) -> None:
        """Forget a prompt; a request without one is ignored."""
        self._open.pop(request_id, None)

    def pool(
        self,
        shares: Sequence[ScheduledRequest],
        query_starts: NDArray[np.int64],
        hidden: Tensor,
        norm: Callable[[Tensor], Tensor],
    ) -> dict[str, Array | None]:
        """Add a step's hidden states.

        query_starts: [shares + 1]: where each share begins among the step's tokens.
        hidden: [tokens, hidden], before the model's final norm, which is `norm`.
        Returns the vectors of the prompts that are complete now, by request; None for such as are
        no numbers.
        """
        complete: dict[str, Array | None] = {}
        for place, share in enumerate(shares):
            request = share.request
            prompt = self._open.get(request.request_id)
            if prompt is None:
                continue
            if prompt.num_tokens not in (None, share.start):
                raise RuntimeError(
                    f"request {request.request_id}: pooling stands at token {prompt.num_tokens}, "
                    f"its next chunk begins at {share.start}"
                )
            prompt.num_tokens = share.start + share.num_tokens
            prompt.pool.add(norm(hidden[query_starts[place] : query_starts[place + 1]]).float())
            if prompt.num_tokens == request.num_tokens:
                complete[request.request_id] = _vectors(prompt.pool.result(), prompt.params)
                del self._open[request.request_id]
        return complete


def _vectors(pooled: Tensor, params: PoolingParams) -> Array | None:
    """What the caller gets: cut to the wanted dimensions, then scaled to length 1. None if a number
    is none."""
    if not pooled.isfinite().all():
        return None
    vectors = pooled[..., : params.dimensions]
    if params.normalize:
        vectors = F.normalize(vectors, dim=-1)
    vectors = vectors.contiguous().cpu()
    return Array("float32", tuple(vectors.shape), vectors.numpy().data)
