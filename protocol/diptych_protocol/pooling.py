"""The parameters and outputs of `EngineClient.encode`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from diptych_protocol.arrays import Array
from diptych_protocol.errors import InvalidRequestError

POOLING_TASKS: Final = ("embed", "token_embed")
"""`embed`: one vector for the prompt; `token_embed`: the last hidden state of each token."""


class PoolingParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters of one pooling request, under vLLM's names."""

    task: str = "embed"
    dimensions: int | None = None
    """Keep only this many leading dimensions (before normalising); None keeps all."""
    normalize: bool = True
    """Scale the vectors to length 1."""

    def check(self) -> None:
        """Raise `InvalidRequestError`, naming the field, unless every value is in range."""
        if self.task not in POOLING_TASKS:
            raise InvalidRequestError(
                f"task {self.task!r} is not supported; this engine pools for "
                f"{', '.join(POOLING_TASKS)}",
                param="task",
            )
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidRequestError("dimensions must be at least 1", param="dimensions")


@dataclass(slots=True)
class PoolingOutput:
    data: Array
    """float32: [dimensions] for `embed`, [prompt tokens, dimensions] for `token_embed`."""


@dataclass(slots=True)
class PoolingRequestOutput:
    """The only answer to a pooling request."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
