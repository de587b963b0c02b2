"""A tiny model that sees, and what transformers makes of the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kit.seeing import save_seeing_model, seeing_config
from torch import Tensor

from diptych_protocol import Array, TokensPrompt

MEAN, STD = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.5, 0.6, 0.7])


class Published:
    """A model on disk, and transformers' object of it."""

    def __init__(self, folder: Path) -> None:
        self.uri = str(folder)
        self._model = save_seeing_model(folder, seeing_config("smolvlm"))

    @torch.inference_mode()
    def worst_gap(self, prompt: TokensPrompt, answer: Sequence[int]) -> float:
        """How far any token of an answer is from being the most likely one, in logits."""
        tiles = [_normalised(f.data) for f in prompt.get("mm_features", []) if f.data is not None]
        given = prompt["prompt_token_ids"]
        inputs: dict[str, Any] = {"input_ids": torch.tensor([[*given, *answer]])}
        if tiles:
            inputs["pixel_values"] = torch.cat(tiles)[None]
        logits: Tensor = self._model(**inputs).logits[0, len(given) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        return float((logits.max(1).values - chosen).max())


def _normalised(data: Array) -> Tensor:
    tiles = torch.frombuffer(bytearray(data.data), dtype=torch.uint8).view(data.shape)
    return (tiles / 255 - MEAN.view(3, 1, 1)) / STD.view(3, 1, 1)


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("seeing"))
