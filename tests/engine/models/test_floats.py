"""Matrices of 16 bits stay as they are, in memory and in products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit.control import Owner
from engine_kit.core import core_request, generate, run
from engine_kit.weights import model_of, replace
from gguf import GGMLQuantizationType as Kind
from model_kit.checkpoints import save_model
from model_kit.gguf import SIZES, random_tensors, save_gguf
from torch import Tensor

from diptych_engine.models import CausalLM, build_model, layer_calls, load_weights
from diptych_engine.models.shard import Shard
from diptych_frontend.model_files.model_source import resolve_model
from diptych_kernels.packed_product import is_available

pytestmark = pytest.mark.skipif(
    not (is_available(torch.bfloat16) and is_available(torch.float16)),
    reason="nothing is packed on this processor",
)
PROMPT = [1, 2, 3]


def save(folder: Path, dtype: torch.dtype, **changes: Tensor) -> str:
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors().items()}
    return save_model(folder, tensors | changes, **SIZES)


def dtypes(model: CausalLM) -> set[torch.dtype | None]:
    packed = [each.linear.packed for each in model.packables]
    return {None if own is None else own.tiles.dtype for own in packed}


def assert_same_parameters(actual: CausalLM, wanted: CausalLM) -> None:
    for (name, own), (_, other) in zip(
        actual.named_parameters(), wanted.named_parameters(), strict=True
    ):
        assert torch.equal(own, other), name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("model"), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_matrix_stays_in_16_bits_once_for_all_engines(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings and the output matrix, too. No float32 is kept beside them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    uri = save(tmp_path / "model", dtype)
    owners = [Owner(model=uri, weight_packing="auto") for _ in range(2)]
    [path] = (tmp_path / "diptych" / "weights").iterdir()
    matrices = sum(t.nbytes for t in random_tensors().values() if t.dim() == 2) // 2
    assert matrices < path.stat().st_size < matrices + 8192
    for owner in owners:
        assert dtypes(model_of(owner)) == {dtype}
        assert_same_parameters(model_of(owner), model_of(Owner(model=uri)))
        for packable in model_of(owner).packables:
            assert packable.linear.packed is not None
            assert packable.linear.weight.untyped_storage().nbytes() == 0
            assert not packable.linear.packed.tiles.untyped_storage().resizable()


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_those_of_a_gguf_file_do_too(kind: Kind, tmp_path: Path) -> None:
    uri = save_gguf(tmp_path / "x.gguf", lambda name: Kind.F32 if "norm" in name else kind)
    own, plain = Owner(model=uri, weight_packing="auto"), Owner(model=uri)
    assert dtypes(model_of(own)) == {torch.float16 if kind is Kind.F16 else torch.bfloat16}
    assert_same_parameters(model_of(own), model_of(plain))


def test_answers_are_those_of_float32(model: str, lone_sequence: Callable[..., Any]) -> None:
    """A prompt whole, and the last tokens as if they had been generated."""
    source, tokens = resolve_model(model), list(range(3, 40))
    plain, packed = (lone_sequence(source, 64, packs=packs) for packs in (False, True))
    packed.cache = packed.cache.float()
    assert dtypes(packed.model) == {torch.bfloat16}
    wanted = plain.logits(tokens)
    for sizes in ([37], [30, 1, 1, 1, 4]):
        actual = packed.logits_in_chunks(tokens, sizes)
        assert float((actual - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("has_matrix_unit", [False, True])
def test_a_table_of_calls_answers_as_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_matrix_unit: bool
) -> None:
    """Generated tokens beside chunks of prompts. A matrix unit, for which a table has two calls of
    each product, changes nothing."""
    if has_matrix_unit:
        monkeypatch.setattr(layer_calls, "integer_rows", lambda num_decodes, rows: num_decodes)
    # One head of 64, since kernels for heads of that size are there already.
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    tensors = {
        name: (tensor.repeat(2, 1) if tensor.shape == (32, 64) else tensor).bfloat16()
        for name, tensor in random_tensors().items()
    }
    uri = save_model(tmp_path, tensors, **{**SIZES, **heads})
    answers = []
    for packing in ("auto", "none"):
        owner = Owner(model=uri, weight_packing=packing, max_num_batched_tokens=16)
        requests = [
            core_request(f"r{size}", list(range(1, size)), max_tokens=12) for size in (5, 33, 60)
        ]
        found = run(owner.core, *requests)
        answers.append({r: [t for o in own for t in o.new_token_ids] for r, own in found.items()})
        calls: Any = getattr(model_of(owner), "_calls", None)
        assert (calls is not None) == (packing == "auto")
        if calls is not None and has_matrix_unit:
            assert (True, True) in calls._tables
    assert answers[0] == answers[1]


def test_keys_and_values_stay_in_float32(model: str) -> None:
    owner = Owner(model=model, weight_packing="auto")
    assert owner.core.description.compat["dtype"] == "float32"


def test_parts_of_two_types_are_not_packed(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    uri = save(tmp_path, torch.bfloat16, **{name: random_tensors()[name]})
    owner = Owner(model=uri, weight_packing="auto")
    plain = [p.published for p in model_of(owner).packables if p.linear.packed is None]
    assert plain == [(name.replace("up", "gate"), name)]
    assert_same_parameters(model_of(owner), model_of(Owner(model=uri)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_own_share(model: str, rank: int) -> None:
    source, shard = resolve_model(model), Shard(rank, 2, lambda _: None)
    own, plain = (
        build_model(source.config, 16, torch.float32, torch.device("cpu"), shard) for _ in range(2)
    )
    load_weights(own.slots, source, packables=own.packables)
    load_weights(plain.slots, source)
    assert dtypes(own) == {torch.bfloat16}
    assert_same_parameters(own, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_new_weights_are_rounded_to_the_type_of_the_first(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    uri = save(tmp_path, dtype)
    owner, plain = Owner(model=uri, weight_packing="auto"), Owner(model=uri)
    new = random_tensors(seed=1)
    down, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("down", "up"))
    given = {down: new[down], up: new[up]}
    replace(owner, given)
    replace(plain, {name: own.to(dtype).float() for name, own in given.items()})
    assert_same_parameters(model_of(owner), model_of(plain))
    assert dtypes(model_of(owner)) == {dtype}
    assert dtypes(model_of(plain)) == {None}, "nothing is packed unless it may be"
    assert generate(owner.core, PROMPT) == generate(plain.core, PROMPT)
