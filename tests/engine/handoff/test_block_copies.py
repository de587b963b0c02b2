"""The engine's KV memory as a hinge sees it: where it is, or through copies."""

from __future__ import annotations

import torch

from diptych_engine.handoff.block_copies import for_the_hinge
from diptych_kernels.block_copy.copies import BlockCopies
from diptych_kv_transfer.memory.shard import MemoryKind


def test_blocks_on_the_host_travel_from_where_they_are_unless_told_otherwise() -> None:
    blocks = torch.zeros((9, 3, 2, 4, 2, 8))
    [direct], mark = for_the_hinge([blocks], "auto")
    assert mark is None
    assert (direct.region.kind, direct.copies) == (MemoryKind.HOST, None)
    assert direct.region.address == blocks.data_ptr()
    assert direct.array().shape == (9, blocks[0].nbytes)
    [copied], mark = for_the_hinge([blocks], "always")
    assert mark is not None
    assert isinstance(copied.copies, BlockCopies)
    assert copied.region.kind is MemoryKind.DEVICE
