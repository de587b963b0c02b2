"""vLLM's KV tensors as the hinge's memory."""

from __future__ import annotations

import pytest
import torch

from diptych_protocol import InvalidRequestError
from diptych_vllm.kv_memory import compat_of, heads_come_first, shards_of
from diptych_vllm.ranks import Ranks

SHAPE = (6, 2, 4, 8)
"""[blocks, heads, block_size, 2 * head_dim], as vLLM's CPU backend has it."""
ONE = Ranks(heads=2)


def layers(dtype: torch.dtype = torch.bfloat16, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "model.0": torch.zeros(SHAPE, dtype=dtype),
        "model.1": torch.zeros(SHAPE, dtype=dtype),
    } | {name.replace("_", "."): tensor for name, tensor in changes.items()}


def test_each_layer_is_a_shard_whose_blocks_are_where_they_were() -> None:
    tensors = layers()
    first, second = shards_of(tensors, num_blocks=6)
    assert first.block_bytes == second.block_bytes == 2 * 4 * 8 * 2
    second.array()[3] = 1
    assert tensors["model.0"].view(torch.uint8).sum() == 0
    assert (tensors["model.1"].view(torch.uint8).flatten(1) == 1).all(dim=1).tolist() == [
        index == 3 for index in range(6)
    ]


def test_layers_of_different_groups_that_have_one_memory_have_one_shard() -> None:
    tensors = layers()
    others = {f"other.{number}": tensors[f"model.{number}"] for number in (1, 0)}
    shards = shards_of(tensors | others, num_blocks=6)
    assert [shard.region.address for shard in shards] == [x.data_ptr() for x in tensors.values()]

    mine = compat_of(tensors | others, {}, ONE)
    assert (mine["num_layers"], mine["num_tensors"]) == (4, 2)
    crossed = {"other.1": tensors["model.0"], "other.0": tensors["model.1"]}
    assert compat_of(tensors | crossed, {}, ONE) != mine

    part = tensors["model.0"].view(6, -1)[:3]
    with pytest.raises(InvalidRequestError, match=r"model\.1 shares memory"):
        shards_of(layers() | {"model.0": tensors["model.0"], "model.1": part.view(6, -1)}, 6)


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.zeros((5, *SHAPE[1:])), "6 blocks"),
        (torch.zeros((2, 6, 4, 8)).transpose(0, 1), "contiguous"),
    ],
    ids=["too few", "not contiguous"],
)
def test_memory_that_was_not_tested_is_refused_by_the_layer(
    tensor: torch.Tensor, problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"model\.1 .*{problem}"):
        shards_of(layers(model_1=tensor), num_blocks=6)


def test_engines_that_keep_kv_differently_differ_in_compat() -> None:
    mine = compat_of(layers(), {"model": "m"}, ONE)
    assert mine == compat_of(layers(), {"model": "m"}, ONE)
    others = [
        compat_of(layers(), {"model": "n"}, ONE),
        compat_of(layers(torch.float16), {"model": "m"}, ONE),
        compat_of(layers(model_1=torch.zeros((6, 4, 2, 8))), {"model": "m"}, ONE),
        compat_of(layers(model_2=torch.zeros(SHAPE)), {"model": "m"}, ONE),
    ]
    assert all(other != mine for other in others)


def rank_of(num_ranks: int, heads: int) -> dict[str, torch.Tensor]:
    """What a rank has of a model with two layers of so many heads."""
    shape = (6, max(1, heads // num_ranks), 4, 8)
    return {name: torch.zeros(shape) for name in ("model.0", "model.1")}


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_engines_with_other_numbers_of_ranks_have_equal_compat(heads: int) -> None:
    found = [
        compat_of(rank_of(num, heads), {"model": "m"}, Ranks(heads, num, rank))
        for num in (1, 2, 4, 8)
        for rank in range(num)
    ]
    assert all(compat == found[0] for compat in found)
    other = compat_of(rank_of(1, heads + 1), {"model": "m"}, Ranks(heads + 1))
    assert other != found[0]


def test_a_layer_whose_heads_are_not_those_of_the_model_needs_as_many_ranks() -> None:
    odd = torch.zeros((6, 1, 4, 8))
    one, two = layers(model_1=odd), layers(model_0=odd, model_1=odd)
    facts = {"model": "m"}
    assert compat_of(one, facts, ONE)["layers"] != compat_of(two, facts, Ranks(2, 2))["layers"]


def test_latent_kv_without_an_axis_of_heads_is_the_same_at_every_rank() -> None:
    latent = {"model.0": torch.zeros((6, 4, 8))}
    one, two = (compat_of(latent, {"model": "m"}, Ranks(1, num)) for num in (1, 2))
    assert one == two


@pytest.mark.parametrize(
    ("layout", "ranks", "first"),
    [
        ("LBHNC", ONE, True),
        ("BLHNC", ONE, True),
        ("LBNHC", ONE, False),
        ("", ONE, False),
        ("LBHNC", Ranks(4), False),
    ],
)
def test_a_head_is_in_one_piece_only_in_layouts_with_heads_first(
    layout: str, ranks: Ranks, first: bool
) -> None:
    assert heads_come_first(layers(), layout, ranks) is first


def test_a_value_that_is_too_long_for_the_wire_still_tells_models_apart() -> None:
    one, two = (compat_of(layers(), {"model": "m" * 300 + end}, ONE)["model"] for end in "ab")
    assert one != two
    assert len(str(one)) <= 256
