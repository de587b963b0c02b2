"""The rows of the running batch: the request in each, and its block table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from diptych_engine.scheduling.kv_groups import KVGroups
from diptych_engine.scheduling.request import ScheduledRequest


class BatchRows:
    """A fixed number of rows. A request keeps its row as long as it runs."""

    def __init__(self, num_rows: int, max_blocks: int, groups: KVGroups, null_block: int) -> None:
        """max_blocks: of each group. null_block: the block that stands for `NULL_BLOCK`."""
        self.block_tables: Final = np.zeros((num_rows, max_blocks * groups.count), np.int64)
        """[rows, max_blocks x groups]; entries from `num_blocks[row]` on are old, but ids of real
        blocks."""
        self.size: Final = num_rows
        self.num_blocks: Final = [0] * num_rows
        self.row_of: Final[dict[str, int]] = {}
        self._free = list(range(num_rows))
        self._groups, self._null_block = groups, null_block
        self._passed = [[0] * groups.count for _ in range(num_rows)]

    def admit(self, request_id: str) -> int:
        """Give a new request a row with an empty table.

        Raises `RuntimeError` if no row is free.
        """
        if not self._free:
            raise RuntimeError(f"request {request_id}: all {len(self.num_blocks)} rows are taken")
        row = self._free.pop()
        self.row_of[request_id] = row
        self.num_blocks[row] = 0
        self._passed[row] = [0] * self._groups.count
        return row

    def release(self, request_id: str) -> int | None:
        """Free a request's row and return it; None if it has none."""
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self._free.append(row)
        return row

    def extend(self, row: int, block_ids: list[int], first_fresh: int) -> list[int]:
        """Copy the ids that the table lacks.

        Returns those of them at position `first_fresh` or later.
        """
        known = self.num_blocks[row]
        self.block_tables[row, known : len(block_ids)] = block_ids[known:]
        if self._groups.windowed:
            new = self.block_tables[row, known : len(block_ids)]
            new[new < 0] = self._null_block
        self.num_blocks[row] = len(block_ids)
        return block_ids[max(known, first_fresh) :]

    def pass_by(self, row: int, num_tokens: int) -> None:
        """Replace the blocks that no token after a request's first ones attends to. They may be
        others' now, whose data must not be read, not even to be masked."""
        count, passed = self._groups.count, self._groups.passed(num_tokens)
        for group, (before, now) in enumerate(zip(self._passed[row], passed, strict=True)):
            if now > before:
                places = slice(before * count + group, now * count, count)
                self.block_tables[row, places] = self._null_block
        self._passed[row] = passed


Shares = Sequence[ScheduledRequest]


def order_of(planned: Shares) -> tuple[Shares, int]:
    """Return shares in the model's order, and how many of them, from the first on, are decodes.

    A decode is one generated token; a chunk is some tokens of a prompt. Attention of the two sums
    up in different orders, which round differently. So the kind of a token decides, not the number
    of tokens that its request computes at once. Generated tokens that are computed again, after a
    preemption or by another engine, are decodes again and yield the same bits.
    """
    for share in planned:
        if share.num_tokens > 1 or share.start < share.request.num_prompt_tokens:
            break
    else:  # decodes only, as in most steps
        return planned, len(planned)
    decodes: list[ScheduledRequest] = []
    chunks: list[ScheduledRequest] = []
    for share in planned:
        request, start = share.request, share.start
        end, end_of_prompt = start + share.num_tokens, request.num_prompt_tokens
        if end <= end_of_prompt:
            chunks.append(share)
            continue
        if start < end_of_prompt:
            chunks.append(ScheduledRequest(request, start, end_of_prompt - start, samples=False))
            start = end_of_prompt
        decodes += [ScheduledRequest(request, i, 1, samples=False) for i in range(start, end - 1)]
        if share.guess is None:
            share = ScheduledRequest(request, end - 1, 1, share.samples)
        decodes.append(share)
    return decodes + chunks, len(decodes)
