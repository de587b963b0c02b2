"""The memory that the hinge reads and writes: our KV, and room for KV of another geometry."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych_kv_transfer.layout import Layout
from diptych_kv_transfer.repack import Shards, repack
from diptych_kv_transfer.staging import Staging
from diptych_kv_transfer.transport import Buffer


class Regions:
    """All the memory of one engine that takes part in transfers. For one thread, but for
    `staged_bytes`."""

    def __init__(self, shards: Shards, layout: Layout | None) -> None:
        """
        Args:
            shards: [num_blocks, bytes of its part of a block] by rank, contiguous.
            layout: of these blocks; None: nothing can be repacked into them.

        Raises `ValueError` for a layout of other blocks.
        """
        found = [shard.shape[1] for shard in shards]
        if layout is not None and found != [layout.block_bytes] * layout.num_ranks:
            raise ValueError(f"blocks of {found} bytes by rank are not those of {layout}")
        self._shards = shards
        self._layout = layout
        self._staged: dict[str, tuple[Staging, Shards]] = {}
        self.block_bytes = sum(shard.shape[1] for shard in shards)
        """Of one block, all ranks."""

    def buffers(self, runs: Sequence[range], staged_for: str | None = None) -> list[Buffer]:
        """The bytes of runs of blocks, of each run every rank's: of our blocks, or of those in a
        request's staging area."""
        shards = self._shards if staged_for is None else self._staged[staged_for][1]
        return [shard[run.start : run.stop].reshape(-1) for run in runs for shard in shards]

    def stage(self, request_id: str, staging: Staging) -> None:
        """Make room for what comes for a request."""
        shape = staging.num_blocks, staging.layout.block_bytes
        ranks = range(staging.layout.num_ranks)
        self._staged[request_id] = staging, [np.empty(shape, np.uint8) for _ in ranks]

    def unpack(self, request_id: str) -> None:
        """Copy what was staged for a request to where it belongs."""
        staging, shards = self._staged[request_id]
        if self._layout is None:
            raise RuntimeError("blocks of another geometry, and no layout of our own")
        repack(
            shards,
            staging.layout,
            self._shards,
            self._layout,
            staging.local_block_ids,
            staging.start,
            staging.end,
        )

    @property
    def staged_bytes(self) -> int:
        """Of all staging areas. Safe to ask from another thread."""
        return sum(staging.num_bytes for staging, _ in list(self._staged.values()))

    def drop(self, request_id: str) -> int:
        """Give a request's staging area back, if it has one; its bytes."""
        staged = self._staged.pop(request_id, None)
        return 0 if staged is None else staged[0].num_bytes
