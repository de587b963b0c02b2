"""vLLM's KV tensors as the hinge's memory."""

from __future__ import annotations

import pytest
import torch

from diptych_protocol import InvalidRequestError
from diptych_vllm.kv_memory import compat_of, shards_of

SHAPE = (6, 2, 4, 8)
"""[blocks, heads, block_size, 2 * head_dim], as vLLM's CPU backend has it."""


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

    mine = compat_of(tensors | others, {})
    assert (mine["num_layers"], mine["num_tensors"]) == (4, 2)
    crossed = {"other.1": tensors["model.0"], "other.0": tensors["model.1"]}
    assert compat_of(tensors | crossed, {}) != mine

    part = tensors["model.0"].view(6, -1)[:3]
    with pytest.raises(InvalidRequestError, match=r"model\.1 shares memory"):
        shards_of(layers() | {"model.0": tensors["model.0"], "model.1": part.view(6, -1)}, 6)


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.zeros(SHAPE, device="meta"), "is on meta"),
        (torch.zeros((5, *SHAPE[1:])), "6 blocks"),
        (torch.zeros((2, 6, 4, 8)).transpose(0, 1), "contiguous"),
    ],
    ids=["a device", "too few", "not contiguous"],
)
def test_memory_that_was_not_tested_is_refused_by_the_layer(
    tensor: torch.Tensor, problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"model\.1 .*{problem}"):
        shards_of(layers(model_1=tensor), num_blocks=6)
    with pytest.raises(InvalidRequestError, match="no KV"):
        shards_of({}, num_blocks=6)


def test_engines_that_keep_kv_differently_differ_in_compat() -> None:
    mine = compat_of(layers(), {"model": "m"})
    assert mine == compat_of(layers(), {"model": "m"})
    others = [
        compat_of(layers(), {"model": "n"}),
        compat_of(layers(torch.float16), {"model": "m"}),
        compat_of(layers(model_1=torch.zeros((6, 4, 2, 8))), {"model": "m"}),
        compat_of(layers(model_2=torch.zeros(SHAPE)), {"model": "m"}),
    ]
    assert all(other != mine for other in others)


def test_a_value_that_is_too_long_for_the_wire_still_tells_models_apart() -> None:
    one, two = (compat_of(layers(), {"model": "m" * 300 + end})["model"] for end in "ab")
    assert one != two
    assert len(str(one)) <= 256
