"""Weights of a file of floats that are rounded to 8 or 4 bits, as the configuration says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_kit.control import Owner
from engine_kit.core import generate, make_core
from engine_kit.weights import assert_equal, model_of, parameters, replace
from model_kit.checkpoints import save_model
from model_kit.gguf import SIZES, random_tensors
from torch import Tensor

from diptych_engine.models.rounding import rounded
from diptych_kernels.cpu_level import CpuLevel, forced
from diptych_kernels.packed_product import is_available
from diptych_protocol import InvalidRequestError

PROMPT = [1, 2, 3]
PACKINGS = pytest.mark.parametrize(("packing", "bits"), [("q8", 8), ("q4", 4)])
needs_kernel = pytest.mark.skipif(not is_available(), reason="nothing is packed on this processor")


def nearest(values: Tensor, bits: int) -> Tensor:
    """Each value's nearest level: of every 32, from the smallest to the largest, 0 between them."""
    groups = values.view(len(values), -1, 32)
    low = groups.amin(-1, keepdim=True).clamp(max=0).half().float()
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    step = ((high - low) / (2**bits - 1)).half().float()
    levels = ((groups - low) / step).round()
    return torch.addcmul(low, levels, step).view_as(values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors().items()}
    return save_model(tmp_path_factory.mktemp("model"), tensors, **SIZES)


def expected(plain: dict[str, Tensor], bits: int) -> dict[str, Tensor]:
    """The parameters of a plain engine, with every matrix rounded."""
    return {
        name: own
        if own.dim() == 1
        else nearest(own, 8)
        if name in ("embedding", "head")
        else nearest(own.t(), bits).t()
        for name, own in plain.items()
    }


@pytest.mark.parametrize("bits", [4, 8])
def test_a_value_moves_by_half_a_step_at_most_and_then_stays(bits: int) -> None:
    """Whatever the sizes of the groups; zeros, and a group of one value."""
    generator = torch.Generator().manual_seed(bits)
    values = torch.randn(16, 6 * 32, generator=generator)
    groups = values.view(16, 6, 32)
    groups *= torch.tensor([0.01, 1.0, 900.0, 0.0, 1.0, 1.0])[:, None]
    groups[:, 4], groups[:, 5] = 0.37, groups[:, 5].abs() + 5
    found = rounded(values, bits)
    assert found is not None
    steps = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / (2**bits - 1)
    moved = (found.values() - values).abs().view_as(groups)
    assert bool((moved <= 0.6 * steps[..., None] + 1e-6).all())
    positive = found.values().view_as(groups)[:, 5]
    assert torch.equal(positive, nearest(groups[:, 5], bits)), "0 is a level of it, too"
    again = rounded(found.values(), bits)
    assert again is not None
    assert torch.equal(again.values(), found.values())


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(torch.ones(16, 48), id="cuts-a-group"),
        pytest.param(torch.ones(32), id="no-matrix"),
        pytest.param(torch.full((16, 32), -1e6), id="too-large"),
        pytest.param(torch.full((16, 32), torch.nan), id="nan"),
    ],
)
def test_what_cannot_be_rounded_stays_as_it_is(values: Tensor) -> None:
    assert rounded(values, 8) is None


@PACKINGS
@needs_kernel
def test_every_matrix_is_rounded_and_packed_once_for_all_engines(
    model: str, packing: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings and the output matrix have 8 bits at least. Nothing plain is kept beside tiles."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    owner = Owner(model=model, weight_packing=packing)
    [path] = (tmp_path / "diptych" / "weights").iterdir()
    made = path.stat().st_mtime_ns, path.stat().st_ino
    wanted = expected(parameters(Owner(model=model)), bits)
    assert_equal(parameters(owner), wanted)
    second = Owner(model=model, weight_packing=packing)
    assert [x.stat().st_ino for x in path.parent.iterdir()] == [made[1]]
    assert_equal(parameters(second), wanted)
    for packable in model_of(second).packables:
        assert packable.linear.packed is not None
        assert packable.linear.weight.untyped_storage().nbytes() == 0
        assert not packable.linear.packed.tiles.untyped_storage().resizable()
    assert generate(owner.core, PROMPT) == generate(second.core, PROMPT)


def test_each_packing_has_a_file_of_its_own(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    eight, four = (parameters(Owner(model=model, weight_packing=x)) for x in ("q8", "q4"))
    assert torch.equal(eight["embedding"], four["embedding"])
    assert not torch.equal(eight["layers.0.qkv"], four["layers.0.qkv"])


@pytest.mark.parametrize("packing", ["q8", "q4"])
def test_a_processor_without_kernels_has_the_same_weights(model: str, packing: str) -> None:
    """Else engines of one service would answer differently."""
    owner = Owner(model=model, weight_packing=packing)
    with forced(CpuLevel.NONE):
        plain = Owner(model=model, weight_packing=packing)
        assert not any(p.linear.packed for p in model_of(plain).packables)
        assert_equal(parameters(plain), parameters(owner))
    assert plain.core.description.compat == owner.core.description.compat


@PACKINGS
@needs_kernel
@pytest.mark.parametrize("published", [True, False], ids=["published", "fused"])
def test_new_weights_are_packed_as_the_first_were(
    model: str, packing: str, bits: int, published: bool
) -> None:
    """What an update leaves out, also of a fused projection, keeps its bits."""
    owner, plain = Owner(model=model, weight_packing=packing), Owner(model=model)
    before = parameters(owner)
    new = random_tensors(seed=1)
    names = ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight",
             "model.embed_tokens.weight", "model.norm.weight"]  # fmt: skip
    given = {name: new[name] for name in names}
    if not published:
        replace(plain, given)
        fused = "layers.1.qkv", "layers.0.down", "embedding", "final_norm"
        given = {name: parameters(plain)[name] for name in fused}
        plain = Owner(model=model)
    for own in (owner, plain):
        replace(own, given, published=published)
    assert_equal(parameters(owner), expected(parameters(plain), bits))
    for name in ("layers.0.qkv", "layers.1.output", "head"):
        assert torch.equal(parameters(owner)[name], before[name])
    assert all(p.linear.packed for p in model_of(owner).packables)
    answer = generate(owner.core, PROMPT)
    owner.call("sleep", 1)
    owner.call("wake_up", None)
    assert generate(owner.core, PROMPT) == answer


def test_dummy_weights_are_rounded_too() -> None:
    uri = "dummy://?hidden_size=64&intermediate_size=128&vocab_size=64&num_hidden_layers=1"
    plain, owner = Owner(model=uri), Owner(model=uri, weight_packing="q4")
    assert_equal(parameters(owner), expected(parameters(plain), 4))


def test_where_nothing_computes_with_levels_rounding_is_refused_by_name(model: str) -> None:
    with pytest.raises(InvalidRequestError, match="weight_packing q8 needs float32") as refused:
        make_core(model, weight_packing="q8", dtype="bfloat16")
    assert refused.value.param == "weight_packing"
