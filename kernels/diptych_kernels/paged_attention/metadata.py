"""What paged attention needs to know about a batch, besides the tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych_kernels.host_arrays import to_device
from diptych_kernels.native.decode_batch import DecodeBatch
from diptych_kernels.native.prefill_chunk import ChunkNumbers
from diptych_kernels.paged_attention.gpu_schedule import Geometry, Schedule, most_splits, schedule

CPU = torch.device("cpu")
MAX_PADDING_RATIO = 2
"""Decodes are gathered together while padding at most doubles the keys that are read."""
MAX_GROUP_TOKENS = 8192
"""Decodes are gathered together while their keys fit a processor's cache. One sequence alone may
exceed it."""


@dataclass(frozen=True)
class AttentionMetadata:
    """The sequences of one step. The first `num_decodes` have one new token each.

    One object serves all layers of a step, so what the reference derives from it is derived once.
    """

    query_starts: NDArray[np.int64]
    """[sequences + 1]: where each sequence's new tokens begin in the batch, and the end of the
    last."""
    context_lens: NDArray[np.int64]
    """[sequences]: tokens of each sequence in the cache, including the new ones."""
    block_tables: NDArray[np.int64]
    """[sequences, >= blocks of the longest]; entries past a sequence's end are valid block ids.
    With several groups of layers there is one entry of each where else there is one."""
    num_decodes: int
    block_size: int
    window: int | None = None
    """A token sees itself and the `window` - 1 tokens before it; None: everything before it."""
    device: torch.device = CPU
    num_groups: int = 1
    """How many groups of layers have blocks of their own."""

    def within(self, window: int | None, group: int = 0) -> Self:
        """Return the same for a group's layers with this window; it is made once a step."""
        if window == self.window and self.num_groups == 1:
            return self
        if (window, group) not in self._narrowed:
            self._narrowed[window, group] = replace(
                self, window=window, block_tables=self._tables_of(group), num_groups=1
            )
        return self._narrowed[window, group]

    def _tables_of(self, group: int) -> NDArray[np.int64]:
        if self.num_groups == 1:
            return self.block_tables
        return np.ascontiguousarray(self.block_tables[:, group :: self.num_groups])

    @cached_property
    def _narrowed(self) -> dict[tuple[int | None, int], Self]:
        return {}

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """The decodes, in groups of similar length."""
        lengths = self.context_lens[: self.num_decodes]
        if not len(lengths):
            return []
        longest = int(lengths.max())
        limit = min(MAX_PADDING_RATIO * int(lengths.sum()), MAX_GROUP_TOKENS)
        if longest * len(lengths) <= limit or len(lengths) == 1:
            return [self._decode_group(slice(0, self.num_decodes), lengths, longest)]
        order = np.argsort(-lengths, kind="stable")
        descending = lengths[order]
        groups = []
        begin = 0
        while begin < len(order):
            longest = int(descending[begin])
            # Members are longer than half of the group's longest.
            end = int(np.searchsorted(-descending, -(longest // MAX_PADDING_RATIO)))
            end = max(min(end, begin + MAX_GROUP_TOKENS // longest), begin + 1)
            members = order[begin:end]
            groups.append(self._decode_group(members, descending[begin:end], longest))
            begin = end
        return groups

    @cached_property
    def prefill_chunks(self) -> list[PrefillChunk]:
        """The sequences with several new tokens, one by one."""
        return [
            self._prefill_chunk(index) for index in range(self.num_decodes, len(self.context_lens))
        ]

    @cached_property
    def decode_batch(self) -> DecodeBatch:
        """The decodes, divided for a CPU's threads."""
        return DecodeBatch(
            self.context_lens[: self.num_decodes],
            self.block_tables[: self.num_decodes],
            self.block_size,
            self.window,
        )

    @cached_property
    def chunk_numbers(self) -> list[ChunkNumbers]:
        """The sequences with several new tokens, each divided for a CPU's threads."""
        return [
            ChunkNumbers(
                slice(int(self.query_starts[index]), int(self.query_starts[index + 1])),
                int(self.context_lens[index]),
                self.block_tables[index],
                self.block_size,
                self.window,
            )
            for index in range(self.num_decodes, len(self.context_lens))
        ]

    def on_device(self, geometry: Geometry) -> tuple[Schedule, Tensor]:
        """Return the GPU's schedule for the step, and its numbers on the device."""
        known = self._schedules.get(geometry)
        if known is None:
            plan = schedule(
                self.query_starts,
                self.context_lens,
                self.block_tables,
                self.num_decodes,
                self.window,
                geometry,
            )
            known = self._schedules[geometry] = plan, to_device(plan.numbers, self.device)
        return known

    @cached_property
    def _schedules(self) -> dict[Geometry, tuple[Schedule, Tensor]]:
        return {}

    def _decode_group(
        self, members: slice | NDArray[np.int64], lengths: NDArray[np.int64], longest: int
    ) -> DecodeGroup:
        num_blocks = -(-longest // self.block_size)
        blocks = self.block_tables[members, :num_blocks].reshape(-1)
        mask = None
        positions = np.arange(longest)
        if len(lengths) > 1 and int(lengths.min()) < longest:
            mask = positions < lengths[:, None]
        if self.window is not None and longest > self.window:
            recent = positions >= (lengths - self.window)[:, None]
            mask = recent if mask is None else mask & recent
        return DecodeGroup(
            rows=members if isinstance(members, slice) else self._tensor(members),
            size=len(lengths),
            blocks=self._tensor(blocks),
            longest=longest,
            mask=None if mask is None else self._tensor(mask)[:, None, None, :],
        )

    def _prefill_chunk(self, index: int) -> PrefillChunk:
        begin, end = int(self.query_starts[index]), int(self.query_starts[index + 1])
        length = int(self.context_lens[index])
        num_blocks = -(-length // self.block_size)
        mask = None
        if end - begin < length or (self.window is not None and length > self.window):
            keys = np.arange(length)
            queries = np.arange(length - (end - begin), length)[:, None]
            seen = keys <= queries
            if self.window is not None:
                seen &= keys > queries - self.window
            mask = self._tensor(seen)
        return PrefillChunk(
            rows=slice(begin, end),
            blocks=self._tensor(self.block_tables[index, :num_blocks]),
            length=length,
            mask=mask,
        )

    def _tensor(self, array: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return to_device(array, self.device)


@dataclass(slots=True, frozen=True)
class DecodeGroup:
    """Decodes whose keys are gathered into one padded tensor."""

    rows: slice | Tensor
    """Positions of their tokens in the batch."""
    size: int
    blocks: Tensor
    """[size * blocks of the longest] int64."""
    longest: int
    """Tokens of the longest context."""
    mask: Tensor | None
    """[size, 1, 1, longest], True where a key is seen; None if all are."""


@dataclass(slots=True, frozen=True)
class PrefillChunk:
    """The new tokens of one sequence."""

    rows: slice
    blocks: Tensor
    """[blocks] int64."""
    length: int
    """Tokens of its context, including the new ones."""
    mask: Tensor | None
    """[new tokens, length], True where a key is seen; None for a plain causal mask."""


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
        for (_, group), other in self._narrowed.items():
            other.change(context_lens, block_tables[:, group :: self.num_groups])
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
