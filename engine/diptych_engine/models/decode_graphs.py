"""A model's decodes as recorded launches.

A step of decodes launches some ten kernels a layer, most of which take a GPU less time than it
takes the host to launch them. A CUDA graph launches them all at once. It repeats exactly what was
recorded, so there is one for each of a few numbers of rows, everything that changes lies at
addresses of its own, and a step is padded to the next such number: with its first row once more,
which writes the same keys and values to the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diptych_engine.models.interface import CausalLM, StepInputs
from diptych_kernels.host_arrays import to_device
from diptych_kernels.paged_attention.fixed_decodes import FixedDecodes

Compute = Callable[[], Tensor]
"""Puts its result at the same place each time it is called."""


@dataclass(slots=True, frozen=True)
class Recorded:
    """A step of so many decodes."""

    inputs: StepInputs
    attention: FixedDecodes
    run: Compute


class DecodeGraphs:
    """Recorded when a number of rows first comes by; nothing they refer to may move."""

    def __init__(
        self,
        model: CausalLM,
        kv_layers: Sequence[Tensor],
        longest: int,
        record: Callable[[Compute], Compute],
    ) -> None:
        """longest: the longest context that a request may have, in tokens."""
        self._model, self._kv_layers = model, kv_layers
        self._longest = longest
        self._record = record
        self._recorded: dict[int, Recorded] = {}

    @staticmethod
    def fit(inputs: StepInputs) -> bool:
        """Whether a step holds nothing but decodes of the model itself."""
        only_decodes = inputs.attention.num_decodes == len(inputs.token_ids)
        return only_decodes and not inputs.adapters and inputs.given is None

    def forward(self, inputs: StepInputs) -> Tensor:
        """As the model's, for inputs that fit. The next call overwrites what this one returns."""
        num_rows = len(inputs.token_ids)
        size = 1 << (num_rows - 1).bit_length()
        rows = np.arange(size)
        rows[num_rows:] = 0
        recorded = self._recorded.get(size)
        if recorded is None:
            return self._first(inputs, rows)[:num_rows]
        order = to_device(rows, inputs.attention.device)
        for old, new in zip(_tensors(recorded.inputs), _tensors(inputs), strict=True):
            torch.index_select(new, 0, order, out=old)
        attention = inputs.attention
        recorded.attention.change(attention.context_lens[rows], attention.block_tables[rows])
        return recorded.run()[:num_rows]

    def forget(self) -> None:
        """Weights or KV may have moved: record anew."""
        self._recorded.clear()

    def _first(
        self, inputs: StepInputs, rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> Tensor:
        """Compute a step launch by launch, which compiles what needs to be, and record it."""
        attention = inputs.attention
        order = to_device(rows, attention.device)
        fixed = FixedDecodes(
            query_starts=np.arange(len(rows) + 1),
            context_lens=attention.context_lens[rows],
            block_tables=attention.block_tables[rows],
            num_decodes=len(rows),
            block_size=attention.block_size,
            window=attention.window,
            device=attention.device,
            longest=self._longest,
        )
        token_ids, positions, blocks, offsets = (
            tensor.index_select(0, order) for tensor in _tensors(inputs)
        )
        own = StepInputs(token_ids, positions, blocks, offsets, fixed)

        def compute() -> Tensor:
            return self._model.forward(own, self._kv_layers)

        hidden = compute()
        self._recorded[len(rows)] = Recorded(own, fixed, self._record(compute))
        return hidden


def _tensors(inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return inputs.token_ids, inputs.positions, inputs.slot_blocks, inputs.slot_offsets


def cuda_recorder() -> Callable[[Compute], Compute]:
    """Records graphs that share their memory, since none runs while another one does."""
    pool = torch.cuda.graph_pool_handle()

    def record(compute: Compute) -> Compute:
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process, the hinge's among them, may go on meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return record
