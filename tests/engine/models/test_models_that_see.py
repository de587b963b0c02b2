"""Tiny random models that see give the features and the logits of their Hugging Face class."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kit.seeing import (
    IMAGE_TOKEN,
    KINDS,
    MEAN,
    STD,
    TILE,
    VISION,
    VOCAB_SIZE,
    save_seeing_model,
    seeing_config,
)
from torch import Tensor

from diptych_engine.models.idefics3 import Idefics3Model
from diptych_engine.models.interface import GivenEmbeddings
from diptych_engine.models.vision import TILES_AT_ONCE, patch_places
from diptych_frontend.model_files.families import FAMILIES
from diptych_frontend.model_files.model_source import resolve_model
from diptych_protocol import InvalidRequestError

TOKENS_PER_TILE = 4


def random_tiles(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 3, TILE, TILE), generator=generator, dtype=torch.uint8)


def normalised(tiles: Tensor) -> Tensor:
    """As the published image processor does it: [1, tiles, 3, edge, edge]."""
    return ((tiles / 255 - MEAN.view(3, 1, 1)) / STD.view(3, 1, 1))[None]


@pytest.fixture(
    scope="module",
    params=[(kind, tied) for kind in KINDS for tied in (False, True)],
    ids=lambda case: f"{case[0]}-{'tied' if case[1] else 'untied'}",
)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, transformers' model)."""
    kind, tied = request.param
    folder = tmp_path_factory.mktemp(kind)
    return folder, save_seeing_model(folder, seeing_config(kind, tied=tied))


def test_features_and_logits_equal_transformers(
    published: Any, lone_sequence: Callable[..., Any]
) -> None:
    folder, model = published
    tiles = random_tiles(TILES_AT_ONCE + 1)
    num_image = len(tiles) * TOKENS_PER_TILE
    text = torch.randint(0, VOCAB_SIZE - 20, (11,)).tolist()
    token_ids = [*text, *[IMAGE_TOKEN] * num_image, *reversed(text)]
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids]), pixel_values=normalised(tiles)).logits[0]
        found = model.model.get_image_features(normalised(tiles)).pooler_output
        features = torch.cat([*found]).flatten(0, -2)
        blank = model(torch.tensor([token_ids]), pixel_values=normalised(tiles * 0 + 7)).logits[0]
    assert expected.std() > 0.5
    assert (expected - blank)[-1].abs().max() > 0.1  # else the image would not matter

    lone = lone_sequence(resolve_model(str(folder)), len(token_ids))
    assert isinstance(lone.model, Idefics3Model)
    with torch.inference_mode():
        rows = lone.model.encode_images(tiles)
    torch.testing.assert_close(rows, features, atol=1e-4, rtol=1e-4)

    places = torch.arange(len(text), len(text) + num_image)
    actual = lone.logits(token_ids, given=GivenEmbeddings(places, rows))
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


def test_every_family_that_sees_is_compared() -> None:
    assert {name for name, family in FAMILIES.items() if family.sees} == set(KINDS)


@pytest.mark.parametrize("edge", [4, 26, 27, 32, 7])
def test_positions_are_counted_as_in_the_published_models(edge: int) -> None:
    """Their arithmetic in float32 moves some of 27 positions."""
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

    sizes: dict[str, Any] = {"image_size": edge * 8, "patch_size": 8, "hidden_size": 3}
    config = seeing_config("idefics3", **sizes, num_attention_heads=1).vision_config
    theirs = Idefics3VisionEmbeddings(config)
    with torch.inference_mode():
        theirs.patch_embedding.weight.zero_()
        assert theirs.patch_embedding.bias is not None
        theirs.patch_embedding.bias.zero_()
        everything = torch.ones(1, edge, edge, dtype=torch.bool)
        rows = theirs(torch.zeros(1, 3, edge * 8, edge * 8), everything)[0]
        own = theirs.position_embedding(patch_places(edge))
    torch.testing.assert_close(rows, own, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_attention_heads": 5}, "5 heads do not divide the vision tower evenly"),
        ({"patch_size": 10}, "tiles of 32 pixels do not make squares"),
        ({"hidden_act": "relu"}, "relu"),
        ({"image_size": 48}, "max_image_size 32 of preprocessor_config.json"),
    ],
)
def test_a_tower_that_cannot_be_built_is_refused_by_what_is_wrong(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    save_seeing_model(tmp_path, seeing_config("smolvlm"))
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["vision_config"] |= VISION | changes
    path.write_text(json.dumps(raw))
    with pytest.raises(InvalidRequestError, match=why):
        resolve_model(str(tmp_path))
