"""Blocks of a device reach the host and come back bit by bit, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from diptych_kernels.block_copy import copies as block_copies
from diptych_kernels.block_copy.copies import BlockCopies, Bus, lie_one_after_the_other

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = (9, 3, 2, 4, 2, 8)
"""[blocks, layers, 2, block size, heads, head size]"""


def cache(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randn(SHAPE, generator=random).to(dtype).to(DEVICE)


def bytes_of(blocks: torch.Tensor) -> NDArray[Any]:
    """[blocks, bytes], in the order of the logical axes."""
    return blocks.contiguous().flatten(1).view(torch.uint8).cpu().numpy().copy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("window_bytes", [1, 3000, 1 << 20])
def test_blocks_go_out_and_come_back(
    dtype: torch.dtype, window_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few of them are brought together at a time."""
    monkeypatch.setattr(block_copies, "WINDOW_BYTES", window_bytes)
    blocks = cache(dtype)
    before = bytes_of(blocks)
    copies = BlockCopies(blocks, Bus(DEVICE))
    np.testing.assert_array_equal(bytes_of(blocks), before, "making ready changes nothing")
    ids = [7, 2, 3, 0, 8]
    room = copies.host_room(len(ids) * copies.block_bytes)
    copies.gather(ids, room)
    np.testing.assert_array_equal(room.reshape(len(ids), -1), before[ids])
    room += 1
    copies.scatter(room, ids[::-1])
    wanted = before.copy()
    wanted[ids[::-1]] = before[ids] + 1
    np.testing.assert_array_equal(bytes_of(blocks), wanted)


@pytest.mark.parametrize("window_bytes", [1, 1 << 20])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_part_of_each_block_goes_out_and_comes_back(
    index: int, window_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_copies, "WINDOW_BYTES", window_bytes)
    blocks = cache()
    before = bytes_of(blocks)
    part = before.shape[1] // 3
    columns = slice(index * part, (index + 1) * part)
    copies = BlockCopies(blocks, Bus(DEVICE))
    room = copies.host_room(2 * part)
    copies.gather([5, 1], room, index, 3)
    np.testing.assert_array_equal(room.reshape(2, -1), before[[5, 1], columns])
    room += 1
    copies.scatter(room, [4, 8], index, 3)
    wanted = before.copy()
    wanted[[4, 8], columns] = before[[5, 1], columns] + 1
    np.testing.assert_array_equal(bytes_of(blocks), wanted)


@pytest.mark.parametrize(("index", "count"), [(0, 7), (3, 3), (-1, 2)])
def test_a_part_that_blocks_do_not_have_is_refused(index: int, count: int) -> None:
    copies = BlockCopies(cache(), Bus(DEVICE))
    room = copies.host_room(copies.block_bytes)
    with pytest.raises(ValueError, match=f"no part {index} of {count}"):
        copies.gather([0], room, index, count)


def test_rooms_are_not_shared() -> None:
    copies = BlockCopies(cache(), Bus(DEVICE))
    first, second = (copies.host_room(copies.block_bytes) for _ in range(2))
    copies.gather([1], first)
    copies.gather([2], second)
    assert not np.shares_memory(first, second)
    assert not np.array_equal(first, second)


def test_several_tensors_share_a_bus() -> None:
    bus = Bus(DEVICE)
    layers = [cache(), cache(torch.float32) + 1]
    expected = [bytes_of(layer)[[3, 1]] for layer in layers]
    for blocks, wanted in zip(layers, expected, strict=True):
        copies = BlockCopies(blocks, bus)
        room = copies.host_room(2 * copies.block_bytes)
        copies.gather([3, 1], room)
        np.testing.assert_array_equal(room.reshape(2, -1), wanted)


def test_the_order_of_a_block_s_axes_does_not_matter() -> None:
    """vLLM's tensors are [blocks, heads, tokens, content], and its memory may have tokens first."""
    memory = torch.arange(5 * 4 * 2 * 8, dtype=torch.int16, device=DEVICE).view(5, 4, 2, 8)
    copies = BlockCopies(memory.transpose(1, 2), Bus(DEVICE))
    room = copies.host_room(copies.block_bytes)
    copies.gather([3], room)
    np.testing.assert_array_equal(room, bytes_of(memory)[3])


@pytest.mark.parametrize(
    ("blocks", "lie"),
    [
        (torch.zeros(5, 2, 4, 8), True),
        (torch.zeros(5, 4, 2, 8).transpose(1, 2), True),
        (torch.zeros(5, 1, 4, 8), True),
        (torch.zeros(5, 3, 2, 4, 8)[:, 1], False),
        (torch.zeros(2, 5, 4, 8).transpose(0, 1), False),
        (torch.zeros(5, 2, 4, 8)[..., :4], False),
        (torch.zeros(5, 2, 4, 8)[::2], False),
    ],
    ids=["plain", "tokens first", "a head", "layers between", "heads outside", "gaps", "every 2nd"],
)
def test_blocks_with_something_between_them_are_told_from_others(
    blocks: torch.Tensor, lie: bool
) -> None:
    assert lie_one_after_the_other(blocks) is lie
    if not lie:
        with pytest.raises(ValueError, match="gaps, or are interleaved"):
            BlockCopies(blocks, Bus(torch.device("cpu")))


def test_tensors_that_were_made_for_inference_are_copied_too() -> None:
    """vLLM makes its tensors so, and they must not be changed elsewhere."""
    with torch.inference_mode():
        blocks = cache()
    copies = BlockCopies(blocks, Bus(DEVICE))
    room = copies.host_room(copies.block_bytes)
    copies.gather([3], room)
    copies.scatter(room, [5])
    assert torch.equal(blocks[5], blocks[3])
