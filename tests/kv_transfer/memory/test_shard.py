"""Regions name memory, keep it alive, and never reach beyond it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from engine_kit.copied_memory import CopiedMemory

from diptych_kv_transfer.memory.shard import MemoryKind, MemoryRegion, Shard
from diptych_kv_transfer.regions import Regions

HOST = {MemoryKind.HOST}


class Owned(np.ndarray):
    """An array that can be watched."""


def test_a_region_and_what_is_made_of_it_keep_the_memory_alive() -> None:
    array = np.arange(16, dtype=np.uint8).view(Owned)
    alive = weakref.ref(array)
    seen = MemoryRegion.of(array).part(4, 8).array()
    del array
    gc.collect()
    assert alive() is not None
    assert seen.tolist() == list(range(4, 12))
    del seen
    gc.collect()
    assert alive() is None


def test_an_array_of_a_region_is_the_same_memory() -> None:
    array = np.zeros(8, np.uint8)
    MemoryRegion.of(array).part(2, 3).array()[:] = 7
    assert array.tolist() == [0, 0, 7, 7, 7, 0, 0, 0]


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 9), (8, 1), (3, -1), (1 << 60, 1)])
def test_no_part_reaches_outside(start: int, length: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        MemoryRegion.of(np.zeros(8, np.uint8)).part(start, length)


@pytest.mark.parametrize("blocks", [range(3, 5), range(-1, 1), range(4, 5)])
def test_no_run_of_blocks_reaches_outside(blocks: range) -> None:
    with pytest.raises(ValueError, match="outside"):
        Shard.of(np.zeros((4, 10), np.uint8)).run(blocks)


def test_memory_in_pieces_is_no_region() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        MemoryRegion.of(np.zeros((4, 4), np.uint8)[:, :2])


def test_the_host_does_not_touch_memory_of_a_device() -> None:
    with pytest.raises(ValueError, match="cuda:0"):
        MemoryRegion(4096, 8, MemoryKind.DEVICE, "cuda:0").array()


def test_blocks_that_a_transport_does_not_reach_need_copies() -> None:
    far = Shard(MemoryRegion(4096, 8, MemoryKind.DEVICE, "cuda:0"), 8)
    with pytest.raises(ValueError, match="does not reach memory of cuda:0"):
        Regions([far], None, HOST)
    [found] = Regions([far], None, set(MemoryKind)).incoming([range(0, 1)])
    assert (found.address, found.kind) == (4096, MemoryKind.DEVICE)


def test_ranks_go_through_copies_together() -> None:
    memory = np.zeros((1, 8), np.uint8)
    with pytest.raises(ValueError, match="all ranks"):
        Regions([Shard.of(memory), CopiedMemory(memory).shard], None, HOST)
