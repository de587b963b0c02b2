"""Packed weights take the place of plain ones in memory, and new weights that of packed ones."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from engine_kit.control import Owner
from engine_kit.core import generate
from engine_kit.weights import assert_equal, model_of, parameters, replace
from gguf import GGMLQuantizationType as Kind
from model_kit.gguf import quantised, random_tensors, save_gguf
from torch import Tensor

from diptych_engine.models import CausalLM, build_model, load_weights
from diptych_engine.models.linear import Linear
from diptych_engine.models.packed import GpuMatrix, PackedMatrix, Part
from diptych_engine.models.rounding import like_tiles, rounded
from diptych_engine.models.shard import Shard
from diptych_frontend.model_files.model_source import resolve_model
from diptych_kernels.packed_product import is_available
from diptych_protocol import Array, InvalidRequestError, WeightTransferUpdateRequest

PROMPT = [1, 2, 3]
LAYERS, IN_LAYER = 2, 4
"""Projections of a layer."""
PACKED = LAYERS * IN_LAYER + 2
"""With embeddings and the output matrix."""

pytestmark = pytest.mark.skipif(not is_available(), reason="nothing is packed on this processor")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


def owner_of(model: str, weight_packing: str = "auto") -> Owner:
    return Owner(model=model, weight_packing=weight_packing)


def tiles_of(owner: Owner) -> list[Tensor]:
    packables = model_of(owner).packables
    return [p.linear.packed.tiles for p in packables if p.linear.packed]


def in_layers(model: CausalLM) -> list[Linear]:
    return [p.linear for p in model.packables if "layers" in p.published[0]]


def bytes_of_weights(model: CausalLM) -> list[int]:
    """The bytes of each projection in the layers, as floats."""
    return [linear.weight.untyped_storage().nbytes() for linear in in_layers(model)]


def resident_bytes(mapped: list[Tensor]) -> int:
    """Bytes of the files that tensors are mappings of, as far as this process has them."""
    starts = {f"{tensor.untyped_storage().data_ptr():x}-" for tensor in mapped}
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    found = 0
    for line in lines:
        if any(line.startswith(start) for start in starts):
            found += next(int(x.split()[1]) for x in lines if x.startswith("Rss:"))
    return found << 10


def test_what_is_packed_is_in_memory_once(model: str) -> None:
    """Also the output matrix, and embeddings."""
    own = model_of(owner_of(model))
    assert [p.linear.weight.untyped_storage().nbytes() for p in own.packables] == [0] * PACKED
    plain = sum(t.nbytes for name, t in own.named_parameters() if "norm" in name)
    tiles = sum(p.linear.packed.tiles.nbytes for p in own.packables if p.linear.packed)
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in own.weight_memory}
    beside_tiles = sum(storage.nbytes() for storage in memory.values()) - plain - tiles
    assert 0 <= beside_tiles < 4096  # the index of the mapped file


def test_parameters_can_be_read_while_they_are_packed(model: str) -> None:
    owner = owner_of(model)
    assert_equal(parameters(owner), parameters(owner_of(model, "none")))
    assert bytes_of_weights(model_of(owner)) == [0] * LAYERS * IN_LAYER


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_unpacks_its_own_share(model: str, rank: int) -> None:
    source = resolve_model(model)
    shard = Shard(rank, 2, lambda _: None)
    own, plain = (
        build_model(source.config, 16, torch.float32, torch.device("cpu"), shard) for _ in range(2)
    )
    load_weights(own.slots, source, packables=own.packables)
    load_weights(plain.slots, source)
    assert bytes_of_weights(own) == [0] * LAYERS * IN_LAYER
    for packable in own.packables:
        packable.linear.unpack()
    for name, slot in plain.slots.items():
        assert torch.equal(own.slots[name].target, slot.target), name


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_the_memory_of_packed_weights_back(model: str, level: int) -> None:
    owner = owner_of(model)
    before = [tensor.clone() for tensor in tiles_of(owner)]
    answer = generate(owner.core, PROMPT)
    held = tiles_of(owner)
    owner.call("sleep", level)
    assert resident_bytes(held) == 0
    owner.call("wake_up", None)
    after = tiles_of(owner)
    assert resident_bytes(after) > 0
    assert len(after) == len(before) == PACKED
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert bytes_of_weights(model_of(owner)) == [0] * LAYERS * IN_LAYER
    assert generate(owner.core, PROMPT) == answer


def test_new_weights_are_packed_until_those_of_the_file_are_back(model: str) -> None:
    owner = owner_of(model)
    old = generate(owner.core, PROMPT)
    new = random_tensors(seed=1)

    owner.call("pause_generation")
    owner.call("start_weight_update", True)
    array = Array("float32", (1,), bytes(4))
    with pytest.raises(InvalidRequestError):
        owner.call("update_weights", WeightTransferUpdateRequest(["nonsense"], [array]))
    assert len(tiles_of(owner)) == PACKED  # nothing was changed

    sizes = [tiles.nbytes for tiles in tiles_of(owner)]
    replace(owner, new)
    assert [tiles.nbytes for tiles in tiles_of(owner)] == sizes
    assert bytes_of_weights(model_of(owner)) == [0] * LAYERS * IN_LAYER
    assert generate(owner.core, PROMPT) != old

    owner.call("pause_generation")
    owner.call("reload_weights")
    owner.call("resume_generation")
    assert len(tiles_of(owner)) == PACKED
    assert bytes_of_weights(model_of(owner)) == [0] * LAYERS * IN_LAYER
    assert generate(owner.core, PROMPT) == old


@pytest.mark.parametrize("packing", ["auto", "q8", "q4"])
@pytest.mark.parametrize("published", [True, False], ids=["published", "fused"])
def test_what_an_update_leaves_out_is_as_in_the_file(
    model: str, packing: str, published: bool
) -> None:
    """Also the other parts of a fused projection; new ones have levels as the file's."""
    owner, plain = owner_of(model, packing), owner_of(model, "none")
    values = parameters(plain)
    if published:
        names = ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight",
                 "lm_head.weight", "model.norm.weight"]  # fmt: skip
        new = {name: random_tensors(seed=1)[name] for name in names}
    else:
        new = {name: 0.3 * values[name] for name in ("layers.1.qkv", "layers.0.mlp_norm")}
    for own in (owner, plain):
        replace(own, new, published=published)
    wanted = parameters(plain)
    for name, matrix in wanted.items():
        changed = (matrix != values[name]).any(0 if "layers" in name else -1)
        if matrix.dim() == 2 and bool(changed.any()):
            rows = matrix if name == "head" else matrix.t()
            levels = rounded(rows[changed], 8 if name == "head" else 4)
            assert levels is not None
            rows[changed] = levels.values()
    assert_equal(parameters(owner), wanted)
    assert len(tiles_of(owner)) == PACKED


KINDS = [4, 6, 8, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def as_tiles(values: Tensor, kind: int | torch.dtype) -> Part:
    part = like_tiles(values, kind)
    assert part is not None
    return part


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_new_rows_are_in_tiles_as_the_others_are(kind: int | torch.dtype, on_gpu: bool) -> None:
    """They are as near as levels of this size can be; the others keep their bits."""
    if on_gpu and kind in (torch.bfloat16, torch.float16):
        pytest.skip("it has no such tiles")
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(rows, 96, generator=generator) for rows in (64, 32))
    weight = torch.empty(96, 64)
    parts = [as_tiles(rows, kind) for rows in (old[:16], old[16:48], old[48:])]

    def matrix(parts: list[Part]) -> PackedMatrix:
        own = GpuMatrix.beside(weight, parts) if on_gpu else PackedMatrix.of(parts)
        assert own is not None
        return own

    fused = new.t().contiguous().t()  # as an update by a model's own names has them
    found = matrix(parts).with_rows(16, fused)
    wanted = matrix([parts[0], as_tiles(new, kind), parts[2]])
    assert found is not None
    assert torch.equal(found.tiles.view(torch.uint8), wanted.tiles.view(torch.uint8))
    step = 2.0**-3 if kind is torch.float8_e4m3fn else 2.0**-7
    if isinstance(kind, int):
        step = 8 / (2**kind - 1)  # of values from -4 to 4
    assert float((as_tiles(new, kind).values() - new).abs().max()) < step
    unfit = new.clone()
    unfit[3, 5] = torch.inf
    assert matrix(parts).with_rows(16, unfit) is None
    assert on_gpu or matrix(parts).with_rows(8, new) is None, "that divides tiles"


@pytest.mark.parametrize("packing", ["auto", "q4"])
def test_what_tiles_cannot_hold_is_plain(model: str, packing: str) -> None:
    """As large numbers are for the factors of levels. Nothing else is changed by it."""
    owner = owner_of(model, packing)
    before, name = parameters(owner), "model.layers.1.self_attn.k_proj.weight"
    large = 1e6 * random_tensors(seed=1)[name]
    replace(owner, {name: large})
    assert len(tiles_of(owner)) == PACKED - 1
    plain = owner_of(model, "none")
    replace(plain, {name: large})
    assert torch.equal(parameters(owner)["layers.1.qkv"], parameters(plain)["layers.1.qkv"])
    replace(owner, {name: random_tensors()[name]})
    found = parameters(owner)["layers.1.qkv"]
    assert torch.equal(found[:, :64], before["layers.1.qkv"][:, :64])
    assert torch.equal(found[:, 96:], before["layers.1.qkv"][:, 96:])


def test_new_weights_sleep_like_any_others(model: str) -> None:
    owner = owner_of(model)
    file = generate(owner.core, PROMPT)
    replace(owner, {"layers.1.down": parameters(owner)["layers.1.down"] * -2}, published=False)
    changed, answer = parameters(owner), generate(owner.core, PROMPT)
    owner.call("sleep", 1)
    owner.call("wake_up", None)
    assert_equal(parameters(owner), changed)
    assert generate(owner.core, PROMPT) == answer
    owner.call("sleep", 2)
    assert bytes_of_weights(model_of(owner)) == [0] * LAYERS * IN_LAYER
    owner.call("wake_up", None)
    assert bytes_of_weights(model_of(owner)) == [0] * LAYERS * IN_LAYER
    assert generate(owner.core, PROMPT) == file


@pytest.mark.parametrize("kept", [0.0, 0.7], ids=["no-file", "part-of-the-file"])
def test_without_its_file_an_engine_goes_on_as_it_was(tmp_path: Path, kept: float) -> None:
    """Awake; or asleep, until the file is back."""
    path = tmp_path / "model.gguf"
    owner = owner_of(save_gguf(path))
    answer = generate(owner.core, PROMPT)
    whole = path.read_bytes()
    path.unlink()
    if kept:
        path.write_bytes(whole[: int(kept * len(whole))])
    owner.call("pause_generation")
    with pytest.raises((InvalidRequestError, ValueError)):
        owner.call("reload_weights")
    owner.call("resume_generation")
    assert len(tiles_of(owner)) == PACKED
    assert generate(owner.core, PROMPT) == answer
    owner.call("sleep", 2)
    with pytest.raises((InvalidRequestError, ValueError)):
        owner.call("wake_up", None)
    path.write_bytes(whole)
    owner.call("wake_up", None)
    assert bytes_of_weights(model_of(owner)) == [0] * LAYERS * IN_LAYER
    assert generate(owner.core, PROMPT) == answer


def test_another_file_may_hold_what_cannot_be_packed(tmp_path: Path) -> None:
    """Projections have their plain weights again, and give them up again."""
    path = tmp_path / "model.gguf"
    source = resolve_model(save_gguf(path))
    model, expected = (
        build_model(source.config, 16, torch.float32, torch.device("cpu")) for _ in range(2)
    )

    def kind_of(name: str) -> Kind:
        return Kind.F32 if "v_proj" in name or "down_proj" in name else quantised(name)

    for own_kind, plain in ((quantised, 0), (kind_of, 2), (quantised, 0)):
        save_gguf(path, own_kind)
        load_weights(model.slots, source, packables=model.packables)
        load_weights(expected.slots, source)
        assert_equal(dict(model.named_parameters()), dict(expected.named_parameters()))
        assert sum(n > 0 for n in bytes_of_weights(model)) == plain * LAYERS


def test_tensors_of_another_shape_are_found_before_anything_is_packed(model: str) -> None:
    source = resolve_model(model)
    config = msgspec.structs.replace(source.config, intermediate_size=96)
    own = build_model(config, 16, torch.float32, torch.device("cpu"))
    with pytest.raises(InvalidRequestError, match="has the shape"):
        load_weights(own.slots, source, packables=own.packables)
    assert not any(packable.linear.packed for packable in own.packables)
