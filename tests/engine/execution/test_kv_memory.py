"""KV memory that two processes have: zeroed, shared, and given back for both."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from diptych_engine.execution.kv_memory import KVMemory, map_shared
from diptych_protocol import InvalidRequestError

BLOCKS, BLOCK_BYTES = 8, 1 << 16


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("kv")
    yield fd
    os.close(fd)


def test_shared_memory_is_the_same_on_both_sides_and_given_back(fd: int) -> None:
    memory = KVMemory(BLOCKS * BLOCK_BYTES, torch.float32, torch.device("cpu"), fd)
    seen = map_shared(fd, BLOCKS)
    assert seen.shape == (BLOCKS, BLOCK_BYTES)
    assert not seen.any()
    memory.tensor.fill_(1.0)
    assert (seen.view("float32") == 1.0).all()
    seen[3] = 0
    per_block = BLOCK_BYTES // 4
    assert memory.tensor.view(BLOCKS, per_block).sum(1).tolist() == [
        0.0 if block == 3 else per_block for block in range(BLOCKS)
    ]
    memory.give_back()
    assert os.fstat(fd).st_blocks == 0, "no page is kept"
    memory.take_again()
    assert not memory.tensor.any()
    assert not seen.any()


def test_a_cache_that_the_system_has_no_memory_for_names_the_field_and_the_remedy() -> None:
    with pytest.raises(InvalidRequestError, match="give the engine more memory") as caught:
        KVMemory(1 << 60, torch.float32, torch.device("cpu"))
    assert caught.value.param == "kv_cache_bytes"
