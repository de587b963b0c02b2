"""GGUF models that are split over files, and tensors of each type."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from model_kit.gguf import random_tensors, save_gguf

from diptych_engine.models import build_model, load_weights
from diptych_frontend.model_files.model_source import resolve_model
from diptych_protocol import InvalidRequestError


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Three files, the first named first."""
    save_gguf(tmp_path / "model.gguf", tensors_a_file=8)
    return sorted(tmp_path.glob("model-*.gguf"))


def test_a_split_model_gives_the_logits_of_the_whole_one(
    parts: list[Path], tmp_path: Path, lone_sequence: Callable[..., Any]
) -> None:
    assert [path.name for path in parts] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    whole = resolve_model(save_gguf(tmp_path / "whole.gguf"))
    split = resolve_model(str(parts[0]))
    assert split.config == whole.config
    tokens = list(range(20))
    expected = lone_sequence(whole, 32).logits(tokens)
    torch.testing.assert_close(lone_sequence(split, 32).logits(tokens), expected, atol=0, rtol=0)


def test_a_router_needs_the_first_part_only(parts: list[Path]) -> None:
    parts[1].unlink()
    assert resolve_model(str(parts[0]), weights=False).config.hidden_size == 64


def test_parts_that_do_not_fit_together_are_named(parts: list[Path]) -> None:
    with pytest.raises(InvalidRequestError, match="one of 3 files; name the first"):
        resolve_model(str(parts[1]))
    shutil.copy(parts[1], parts[2])
    with pytest.raises(InvalidRequestError, match=r"00003-of-00003\.gguf is not its part 3 of 3"):
        resolve_model(str(parts[0]))
    parts[2].unlink()
    with pytest.raises(
        InvalidRequestError, match=r"its part model-00003-of-00003\.gguf is missing"
    ):
        resolve_model(str(parts[0]))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q5_0", "Q5_1", "MXFP4"])
def test_a_tensor_has_the_values_that_the_gguf_package_reads(kind: str, tmp_path: Path) -> None:
    stored = Kind[kind]
    uri = save_gguf(tmp_path / "model.gguf", lambda name: Kind.F32 if "norm" in name else stored)
    source = resolve_model(uri)
    model = build_model(source.config, 64, torch.float32, torch.device("cpu"))
    load_weights(model.slots, source)
    name = "model.layers.1.mlp.down_proj.weight"
    raw = gguf.quants.quantize(random_tensors()[name].numpy(), stored)
    expected = gguf.quants.dequantize(raw, stored)
    np.testing.assert_array_equal(model.slots[name].target.numpy(), expected)
