"""Decodes for a GPU that replays recorded launches: the numbers that differ from step to step are
in memory at a fixed address."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych_kernels.host_arrays import to_device
from diptych_kernels.paged_attention.gpu_schedule import Geometry, Schedule, most_splits, schedule
from diptych_kernels.paged_attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class FixedDecodes(AttentionMetadata):
    """The numbers of a first step, which `change` replaces by those of another one with as many
    sequences."""

    longest: int = 0
    """The longest context of any step."""

    def on_device(self, geometry: Geometry) -> tuple[Schedule, Tensor]:
        known = self._schedules.get(geometry)
        if known is None:
            visible = self.longest if self.window is None else min(self.longest, self.window)
            num_splits = most_splits(self.num_decodes, visible, geometry)
            plan = self._cut(self.context_lens, self.block_tables, geometry, num_splits)
            widest = self.num_decodes * -(-self.longest // self.block_size)
            numbers = torch.zeros(plan.tables_at + widest, dtype=torch.int32, device=self.device)
            self._write(plan, numbers)
            known = self._schedules[geometry] = plan, numbers
        return known

    def change(self, context_lens: NDArray[np.int64], block_tables: NDArray[np.int64]) -> None:
        """Replace the numbers that recorded launches read; the arguments are named as the
        attributes."""
        for geometry, (plan, numbers) in self._schedules.items():
            self._write(self._cut(context_lens, block_tables, geometry, plan.num_splits), numbers)

    def _cut(
        self,
        context_lens: NDArray[np.int64],
        block_tables: NDArray[np.int64],
        geometry: Geometry,
        num_splits: int,
    ) -> Schedule:
        starts, count = self.query_starts, self.num_decodes
        return schedule(
            starts, context_lens, block_tables, count, self.window, geometry, num_splits
        )

    def _write(self, plan: Schedule, numbers: Tensor) -> None:
        numbers[: len(plan.numbers)].copy_(to_device(plan.numbers, self.device), non_blocking=True)
