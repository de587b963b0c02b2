"""A start reads each byte of a model's tensors once, and the next one none of what is packed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from model_kit.checkpoints import save_model
from model_kit.families import published
from model_kit.gguf import SIZES, quantised, random_tensors, save_gguf
from model_kit.quantised_folders import FORMATS, FUSED, MODULES, save
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from diptych_engine.models import CausalLM, build_model, load_weights, stored_parts
from diptych_frontend.model_files.model_source import resolve_model
from diptych_kernels.packed_product import is_available

SHAPES = "weight_shape"
"""Two numbers, which stand for a header."""


class Reads:
    """How often each number of each tensor was read, or each byte of a file."""

    def __init__(self) -> None:
        self._times: dict[str, Tensor] = {}
        self.hashed = 0

    def count(self, name: str, shape: list[int], index: Any) -> None:
        self._times.setdefault(name, torch.zeros(shape, dtype=torch.uint8))[index] += 1

    def taken(self) -> dict[str, Tensor]:
        """The counts since the last call."""
        times, self._times = self._times, {}
        return {name: own for name, own in times.items() if not name.endswith(SHAPES)}


class CountedFile:
    """An open file of safetensors, or with `name` a tensor of it."""

    def __init__(self, own: Any, reads: Reads, name: str = "") -> None:
        self._own, self._reads, self._name = own, reads, name

    def __enter__(self) -> CountedFile:
        self._own.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._own.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def get_slice(self, name: str) -> CountedFile:
        return CountedFile(self._own.get_slice(name), self._reads, name)

    def __getitem__(self, index: Any) -> Tensor:
        self._reads.count(self._name, self._own.get_shape(), index)
        found: Tensor = self._own[index]
        return found


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """What starts read from now on, of files that are mapped as usual."""
    found, sha256 = Reads(), hashlib.sha256

    class CountedMap(np.memmap[Any, Any]):
        def __getitem__(self, index: Any) -> Any:
            if not isinstance(self.base, np.ndarray):  # it is the whole file
                found.count(str(self.filename), [self.size], index)
            return super().__getitem__(index)

    def counted(content: Any = b"", **options: Any) -> Any:
        found.hashed += memoryview(content).nbytes
        return sha256(content, **options)

    def opened(*arguments: Any, **options: Any) -> CountedFile:
        return CountedFile(safe_open(*arguments, **options), found)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_parts, "safe_open", opened)
    monkeypatch.setattr(np, "memmap", CountedMap)
    monkeypatch.setattr(hashlib, "sha256", counted)
    return found


def started(uri: str, bits: int | None = None) -> CausalLM:
    source = resolve_model(uri)
    own = build_model(source.config, 16, torch.float32, torch.device("cpu"), packs=True)
    load_weights(own.slots, source, packables=own.packables, bits=bits)
    return own


def kind_of(name: str) -> Kind:
    """What cannot be packed is beside what can be, also in one projection."""
    if "v_proj" in name:
        return Kind.F16
    return Kind.F32 if "down_proj" in name else quantised(name)


def save_mxfp4(folder: Path) -> str:
    """Experts in 4 bits, each of which is two parts of one stored tensor."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    published("gpt_oss", folder, sizes)
    [path] = folder.glob("*.safetensors")
    stored = load_file(path)
    for name in [each for each in stored if each.endswith("_proj") and "experts" in each]:
        experts, columns, rows = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16))
        stored[f"{name}_blocks"] = blocks.to(torch.uint8)
        stored[f"{name}_scales"] = torch.full(blocks.shape[:3], 120, dtype=torch.uint8)
    save_file(stored, path)
    return str(folder)


def saved(folder: Path, name: str) -> str:
    if name == "mxfp4":
        return save_mxfp4(folder / "model")
    if name == "gguf":
        return save_gguf(folder / "model.gguf", kind_of)
    if name == "bfloat16":
        tensors = {key: own.bfloat16() for key, own in random_tensors().items()}
        return save_model(folder / "model", tensors, **SIZES)
    config, scheme, _ = FORMATS[name.removesuffix("-fused")]
    fused = name.endswith("-fused")
    modules, family = (FUSED, "phi3") if fused else (MODULES, "llama")
    return save(folder / "model", config, scheme, modules, family)[0]


@pytest.mark.one_in(2, "name")
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(
    "name",
    [
        "gguf", "bfloat16", "fp8-blocks-fused", "awq-fused", "gptq-4-fused", "gptq-sorted",
        "gptq-sorted-fused", "int4-zeros-fused", "int8-tensor-fused", "mxfp4",
    ],
)  # fmt: skip
def test_each_byte_is_read_once(name: str, bits: int | None, tmp_path: Path, reads: Reads) -> None:
    uri = saved(tmp_path, name)
    model = started(uri, bits)
    times = reads.taken()
    assert {key: int(own.max()) for key, own in times.items()} == dict.fromkeys(times, 1)
    tensors = sum(int(own.sum()) for own in times.values())

    reads.hashed = 0
    again = started(uri, bits)
    for (_, own), (_, other) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(own, other)
    times = reads.taken()
    assert max(int(own.max()) for own in times.values()) == 1
    if not is_available():
        return
    plain = sum(int(own.sum()) for own in times.values())
    packed = [each.linear.packed for each in again.packables]
    assert (plain < 0.1 * tensors) == (None not in packed), "what is packed is not read again"
    tiles = sum(own.tiles.nbytes for own in packed if own is not None)
    assert tiles <= reads.hashed <= 2 * tiles, "beside them only names"
