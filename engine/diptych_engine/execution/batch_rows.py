"""The rows of the running batch: the request in each, and its block table."""

from __future__ import annotations

from typing import Final

import numpy as np


class BatchRows:
    """A fixed number of rows. A request keeps its row as long as it runs."""

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.block_tables: Final = np.zeros((num_rows, max_blocks), np.int64)
        """[rows, max_blocks]; entries from `num_blocks[row]` on are old, but ids of real blocks."""
        self.size: Final = num_rows
        self.num_blocks: Final = [0] * num_rows
        self.row_of: Final[dict[str, int]] = {}
        self._free = list(range(num_rows))

    def admit(self, request_id: str) -> int:
        """Give a new request a row with an empty table.

        Raises `RuntimeError` if no row is free.
        """
        if not self._free:
            raise RuntimeError(f"request {request_id}: all {len(self.num_blocks)} rows are taken")
        row = self._free.pop()
        self.row_of[request_id] = row
        self.num_blocks[row] = 0
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
        self.num_blocks[row] = len(block_ids)
        return block_ids[max(known, first_fresh) :]
