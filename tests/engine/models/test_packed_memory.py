"""Packed weights take the place of plain ones in memory, until new weights come."""

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


def test_new_weights_are_used_plainly_until_those_of_the_file_are_back(model: str) -> None:
    owner = owner_of(model)
    old = generate(owner.core, PROMPT)
    new = random_tensors(seed=1)

    owner.call("pause_generation")
    owner.call("start_weight_update", True)
    array = Array("float32", (1,), bytes(4))
    with pytest.raises(InvalidRequestError):
        owner.call("update_weights", WeightTransferUpdateRequest(["nonsense"], [array]))
    assert len(tiles_of(owner)) == PACKED  # nothing was changed

    replace(owner, new)
    assert tiles_of(owner) == []
    assert generate(owner.core, PROMPT) != old

    owner.call("pause_generation")
    owner.call("reload_weights")
    owner.call("resume_generation")
    assert len(tiles_of(owner)) == PACKED
    assert bytes_of_weights(model_of(owner)) == [0] * LAYERS * IN_LAYER
    assert generate(owner.core, PROMPT) == old


@pytest.mark.parametrize("published", [True, False], ids=["published", "fused"])
def test_what_an_update_leaves_out_is_as_in_the_file(model: str, published: bool) -> None:
    """Also the other parts of a fused projection."""
    owner, plain = owner_of(model), owner_of(model, "none")
    if published:
        names = ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"]
        new = {name: random_tensors(seed=1)[name] for name in names}
    else:
        values = parameters(plain)
        new = {name: 0.5 * values[name] for name in ("layers.1.qkv", "layers.0.mlp_norm")}
    for own in (owner, plain):
        replace(own, new, published=published)
    assert_equal(parameters(owner), parameters(plain))
    assert generate(owner.core, PROMPT) == generate(plain.core, PROMPT)


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
