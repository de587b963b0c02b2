"""Loading weights: random ones are reproducible, unusable files are refused by name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers  # its classes are imported when they are used
from engine_kit.core import make_core
from model_kit.gguf import save_gguf
from safetensors.torch import load_file, save_file

from diptych_engine.models import CausalLM, build_model, load_weights
from diptych_frontend.model_files.model_source import ModelSource, resolve_model
from diptych_protocol import InvalidRequestError

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}


def built(source: ModelSource, dtype: torch.dtype = torch.float32) -> CausalLM:
    return build_model(source.config, 64, dtype, torch.device("cpu"))


def loaded(source: ModelSource, **options: Any) -> dict[str, torch.Tensor]:
    """Every published tensor as it stands in the model."""
    model = built(source)
    load_weights(model.slots, source, **options)
    return {name: slot.target for name, slot in model.slots.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(path)
    return path


def altered(folder: Path, target: Path, **changes: torch.Tensor | None) -> ModelSource:
    """A copy with some tensors replaced, added or (None) removed."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors: dict[str, Any] = load_file(target / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, target / "model.safetensors")
    return resolve_model(str(target))


def test_dummy_weights_are_a_function_of_the_seed() -> None:
    source = resolve_model("dummy://?num_hidden_layers=1")
    first, again, other = (loaded(source, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_progress_reaches_the_total(folder: Path) -> None:
    for uri in ("dummy://", str(folder)):
        calls: list[tuple[int, int]] = []
        loaded(resolve_model(uri), on_progress=lambda done, total, c=calls: c.append((done, total)))
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)
        assert calls[-1][0] == calls[-1][1] > 0


def test_a_repeated_tied_head_and_old_constants_are_passed_over(
    folder: Path, tmp_path: Path
) -> None:
    extra = {
        "lm_head.weight": torch.zeros(32, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    assert "lm_head.weight" not in loaded(altered(folder, tmp_path, **extra))


@pytest.mark.parametrize(
    ("name", "tensor", "complaint"),
    [
        pytest.param("model.norm.weight", None, "missing", id="missing"),
        pytest.param("model.norm.weight", torch.zeros(33), r"shape \[33\], not \[32\]", id="shape"),
        pytest.param("model.layers.0.mlp.up_proj.bias", torch.zeros(64), "no place", id="extra"),
    ],
)
def test_unusable_tensors_are_named_before_anything_is_allocated(
    folder: Path,
    tmp_path: Path,
    name: str,
    tensor: torch.Tensor | None,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = altered(folder, tmp_path, **{name: tensor})
    monkeypatch.delattr("diptych_engine.execution.runner.build_model")
    with pytest.raises(InvalidRequestError, match=f"tensor {name}.*{complaint}"):
        make_core(source.uri)


def test_a_damaged_file_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(InvalidRequestError, match=r"model\.safetensors cannot be read"):
        loaded(resolve_model(str(tmp_path)))


def test_weights_are_converted_to_the_models_type(folder: Path) -> None:
    source = resolve_model(str(folder))
    model = built(source, torch.bfloat16)
    load_weights(model.slots, source)
    expected = loaded(source)["model.norm.weight"].bfloat16()
    assert torch.equal(model.slots["model.norm.weight"].target, expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_gguf_types_and_row_orders(
    architecture: str, tmp_path: Path, lone_sequence: Any, folder: Path
) -> None:
    """The same weights as GGUF and as safetensors give the same logits.

    llama.cpp's converter reorders the query and key rows of `llama` files, and of no other.
    """
    tensors = load_file(folder / "model.safetensors")
    if architecture == "qwen2":
        for part, rows in (("q", 32), ("k", 16), ("v", 16)):
            tensors[f"model.layers.0.self_attn.{part}_proj.bias"] = torch.randn(rows)
    # What the quantised types round away must be gone on both sides.
    tensors = {name: rounded(tensor, gguf_type(name)) for name, tensor in tensors.items()}
    altered(folder, tmp_path, **tensors)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"llama"', f'"{architecture}"'))
    write_gguf(tmp_path / "model.gguf", architecture, tensors)

    tokens = list(range(20))
    actual = lone_sequence(resolve_model(str(tmp_path / "model.gguf")), 32).logits(tokens)
    expected = lone_sequence(resolve_model(str(tmp_path)), 32).logits(tokens)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 0.5


def gguf_type(name: str) -> gguf.GGMLQuantizationType:
    """A mixture, as in real files."""
    if "mlp" in name:
        return gguf.GGMLQuantizationType.Q8_0
    return gguf.GGMLQuantizationType.F16 if "o_proj" in name else gguf.GGMLQuantizationType.F32


def rounded(tensor: torch.Tensor, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    quantized = gguf.quants.quantize(tensor.numpy(), kind)
    return torch.from_numpy(np.array(gguf.quants.dequantize(quantized, kind)))


def write_gguf(path: Path, architecture: str, tensors: dict[str, torch.Tensor]) -> None:
    """As llama.cpp's converter would."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 1)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(32)
    for name, tensor in tensors.items():
        values = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            halves = values.reshape(-1, 2, 4, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        kind = gguf_type(name)
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")),  # type: ignore[arg-type]
            gguf.quants.quantize(values, kind),
            raw_dtype=kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_weights_that_are_a_pipe_are_not_waited_for(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    source = resolve_model(str(tmp_path))
    with pytest.raises(InvalidRequestError, match="no ordinary file"):
        loaded(source)


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors"])
def test_a_file_that_ends_too_early_is_refused_before_anything_is_allocated(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its tensor and the byte; what allocates is out of reach."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / name
    if name == "model.gguf":
        save_gguf(path)
    size = path.stat().st_size
    os.truncate(path, size - 100)
    monkeypatch.delattr("diptych_engine.execution.runner.build_model")
    with pytest.raises(
        InvalidRequestError, match=rf"tensor \S+ ends .* byte {size} of {size - 100}"
    ):
        make_core(str(path if name == "model.gguf" else tmp_path), weight_packing="none")
