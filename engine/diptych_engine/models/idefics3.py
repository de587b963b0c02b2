"""Idefics 3 and SmolVLM: a Llama decoder, some of whose embeddings come from a vision tower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from diptych_engine.models.interface import WeightSlot
from diptych_engine.models.linear import Linear
from diptych_engine.models.llama import LlamaModel
from diptych_engine.models.shard import WHOLE, Shard
from diptych_engine.models.vision import Sight
from diptych_frontend.model_files.model_config import ModelConfig


class Idefics3Model(LlamaModel):
    """A decoder with a vision tower, which is complete on every rank and used on the first one
    only."""

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
        group_of: Sequence[int] = (),
        *,
        packs: bool = False,
    ) -> None:
        """Raises `ValueError` for a configuration without vision."""
        super().__init__(config, max_positions, dtype, device, shard, group_of, packs=packs)
        if config.vision is None:
            raise ValueError(f"{config.architecture} without vision")
        self._sight = Sight(config.vision, config.hidden_size, dtype, device)
        for name, parameter in self._sight.named_parameters():
            self.slots[f"model.{name}"] = WeightSlot(parameter)

    @property
    def encode_images(self) -> Callable[[Tensor], Tensor]:
        return self._sight

    def _named_parts(self) -> Iterator[tuple[str, Tensor | Linear]]:
        yield from super()._named_parts()
        yield from self._sight.named_parameters()
