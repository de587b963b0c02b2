"""Maps a family to the class that computes its models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from diptych_engine.models.idefics3 import Idefics3Model
from diptych_engine.models.interface import CausalLM
from diptych_engine.models.llama import LlamaModel
from diptych_engine.models.shard import WHOLE, Shard
from diptych_frontend.model_files.model_config import ModelConfig, family_of

Builder = Callable[..., CausalLM]
"""Takes the arguments of `build_model`."""

BUILDERS: Final[dict[str, Builder]] = {"llama": LlamaModel, "idefics3": Idefics3Model}
"""Builders, by the name that a `FamilySpec` gives its model class."""


def build_model(
    config: ModelConfig,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
    group_of: Sequence[int] = (),
    *,
    packs: bool = False,
) -> CausalLM:
    """Allocate a rank's share of a model, with undefined weights.

    group_of: the number of each layer's group, if layers are in groups with KV blocks of their own.
    packs: its `packables` have no memory until they are loaded.

    Raises `InvalidRequestError` for an unknown architecture.
    """
    builder = BUILDERS[family_of(config.architecture).model]
    return builder(config, max_positions, dtype, device, shard, group_of, packs=packs)
