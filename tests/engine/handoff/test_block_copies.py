"""Blocks of a device reach the host and come back bit by bit, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diptych_engine.handoff import block_copies
from diptych_engine.handoff.block_copies import BlockCopies, for_the_hinge
from diptych_kv_transfer.memory.region import MemoryKind

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cache(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[blocks, layers, 2, block size, heads, head size]"""
    random = torch.Generator().manual_seed(1)
    return torch.randn((9, 3, 2, 4, 2, 8), generator=random).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("window_bytes", [1, 3000, 1 << 20])
def test_blocks_go_out_and_come_back(
    dtype: torch.dtype, window_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few of them are brought together at a time."""
    monkeypatch.setattr(block_copies, "WINDOW_BYTES", window_bytes)
    blocks = cache(dtype)
    before = blocks.clone()
    copies = BlockCopies(blocks)
    assert torch.equal(blocks, before), "making ready changes nothing"
    ids = [7, 2, 3, 0, 8]
    region = copies.host_room(len(ids) * copies.block_bytes)
    copies.gather(ids, region)
    room = region.array().reshape(len(ids), -1)
    expected = before[ids].flatten(1).view(torch.uint8).cpu().numpy()
    np.testing.assert_array_equal(room, expected)
    room += 1
    copies.scatter(region, ids[::-1])
    found = blocks.flatten(1).view(torch.uint8).cpu().numpy()
    wanted = before.flatten(1).view(torch.uint8).cpu().numpy().copy()
    wanted[ids[::-1]] = expected + 1
    np.testing.assert_array_equal(found, wanted)


def test_rooms_are_not_shared() -> None:
    copies = BlockCopies(cache())
    rooms = [copies.host_room(copies.block_bytes) for _ in range(2)]
    copies.gather([1], rooms[0])
    copies.gather([2], rooms[1])
    first, second = (room.array() for room in rooms)
    assert not np.shares_memory(first, second)
    assert not np.array_equal(first, second)


def test_blocks_on_the_host_travel_from_where_they_are_unless_told_otherwise() -> None:
    blocks = cache().cpu()
    [direct] = for_the_hinge([blocks], "auto")
    assert (direct.region.kind, direct.copies) == (MemoryKind.HOST, None)
    assert direct.region.address == blocks.data_ptr()
    assert direct.array().shape == (9, blocks[0].nbytes)
    [copied] = for_the_hinge([blocks], "always")
    assert isinstance(copied.copies, BlockCopies)
    assert copied.region.kind is MemoryKind.DEVICE
