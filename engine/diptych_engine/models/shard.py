"""Tensor parallelism: each rank has a part of the heads, and of the inner dimension, of every
layer.

It has all experts of a mixture, with a part of the inner dimension of each.

After Shoeybi et al., "Megatron-LM" (2019): the projections into attention and into the MLP are
split by output, those out of them by input, so that one sum over the ranks ends each half of a
layer. Embeddings, norms and the output matrix are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from torch import Tensor

from diptych_frontend.model_files.model_source import ModelConfig
from diptych_protocol import InvalidRequestError


@dataclass(slots=True, frozen=True)
class Span:
    """A rank's share of a dimension of a published tensor."""

    start: int
    length: int
    whole: int
    """The dimension's length in the published tensor."""


@dataclass(slots=True, frozen=True)
class Shard:
    """A rank's share of the model."""

    rank: int = 0
    size: int = 1
    reduce: Callable[[Tensor], None] | None = None
    """Sums a tensor over all ranks, in place; None if there is only one."""

    def check(self, config: ModelConfig) -> None:
        """Raise `InvalidRequestError` unless the model can be divided evenly."""
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        for what, ok in (
            (f"{heads} heads", heads % self.size == 0),
            (f"{kv_heads} key-value heads", kv_heads % self.size == 0 or self.size % kv_heads == 0),
            (f"intermediate_size {config.intermediate_size}",
             config.intermediate_size % self.size == 0),
            (f"moe_intermediate_size {config.moe_intermediate_size}",
             config.moe_intermediate_size % self.size == 0),
        ):  # fmt: skip
            if not ok:
                raise InvalidRequestError(
                    f"tensor_parallel_size {self.size} does not divide the model's {what}",
                    param="tensor_parallel_size",
                )

    def local(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration of this rank's part, as if it were a whole model."""
        experts = config.moe_intermediate_size
        return msgspec.structs.replace(
            config,
            num_attention_heads=self.share(config.num_attention_heads).length,
            num_key_value_heads=self.share(config.num_key_value_heads).length,
            intermediate_size=self.share(config.intermediate_size).length,
            moe_intermediate_size=self.share(experts).length if experts else 0,
        )

    def share(self, whole: int, unit: int = 1) -> Span:
        """Return this rank's share of `whole` items of `unit` rows each.

        If there are fewer items than ranks (key-value heads), several consecutive ranks have the
        same one.
        """
        length = max(1, whole // self.size)
        start = self.rank * whole // self.size
        return Span(start * unit, length * unit, whole * unit)


WHOLE: Final = Shard()
"""The share of a single rank."""
