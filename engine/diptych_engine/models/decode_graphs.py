"""Records a model's decodes as CUDA graphs.

A step of decodes launches about ten kernels per layer, most of which take a GPU less time than the
host needs to launch them. A CUDA graph launches them all at once. It repeats exactly what was
recorded. So there is one graph for each of a few numbers of rows, a step is padded to the next such
number, and everything that changes has fixed addresses. A row of padding is the first token of an
artificial sequence: it reads one key, in a block of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from diptych_engine.models.interface import CausalLM, StepInputs
from diptych_kernels.host_arrays import to_device
from diptych_kernels.paged_attention.metadata import FixedDecodes

Compute = Callable[[], Tensor]
"""A computation that puts its result at the same place each time it is called."""
Recorder = Callable[[Compute], Compute]


@dataclass(slots=True, frozen=True)
class Recorded:
    """A recorded step of a certain number of decodes."""

    inputs: StepInputs
    attention: FixedDecodes
    run: Compute


class DecodeGraphs:
    """Records a number of rows at its first use. Nothing that a graph refers to may move."""

    def __init__(
        self,
        model: CausalLM,
        kv_layers: Sequence[Tensor],
        longest: int,
        make_recorder: Callable[[], Recorder],
    ) -> None:
        """
        Args:
            kv_layers: their last block belongs to no request; rows of padding write to it.
            longest: the longest context that a request may have, in tokens.
            make_recorder: called again whenever all that was recorded is forgotten.
        """
        self._model, self._kv_layers = model, kv_layers
        self._spare_block = len(kv_layers[0]) - 1
        self._longest = longest
        self._make_recorder = make_recorder
        self._record = make_recorder()
        self._recorded: dict[int, Recorded] = {}
        self._addresses: list[int] = []
        """Where everything was when the first step was recorded."""

    @staticmethod
    def fit(inputs: StepInputs) -> bool:
        """Whether a step contains nothing but decodes of the model without adapters."""
        only_decodes = inputs.attention.num_decodes == len(inputs.token_ids)
        plain = not inputs.adapters and inputs.given is None and inputs.routed is None
        return only_decodes and plain

    def forward(self, inputs: StepInputs) -> Tensor:
        """Do the same as the model's `forward`, for inputs that fit. The next call overwrites the
        result."""
        num_rows = len(inputs.token_ids)
        size = 1 << (num_rows - 1).bit_length()
        padded = self._padded(inputs, size)
        recorded = self._recorded.get(size)
        if recorded is None:
            return self._first(padded)[:num_rows]
        for old, new in zip(_tensors(recorded.inputs), _tensors(padded), strict=True):
            old.copy_(new)
        attention = padded.attention
        recorded.attention.change(attention.context_lens, attention.block_tables)
        return recorded.run()[:num_rows]

    def forget(self) -> None:
        """Forget all graphs, because they may be wrong; they are recorded again."""
        self._recorded.clear()
        self._record = self._make_recorder()

    def forget_moved(self) -> None:
        """Forget all graphs if weights or KV have moved or were released."""
        if self._recorded and self._addresses != self._now():
            self.forget()

    def _now(self) -> list[int]:
        memory = (*self._model.weight_memory, *self._kv_layers)
        return [tensor.untyped_storage().data_ptr() for tensor in memory]

    def _padded(self, inputs: StepInputs, size: int) -> StepInputs:
        """The same with as many rows as are recorded."""
        attention, extra = inputs.attention, size - len(inputs.token_ids)
        if not extra:
            return inputs
        ones = np.ones(extra, np.int64)
        unused = np.full((extra, attention.block_tables.shape[1]), self._spare_block)
        padding = to_device(np.outer([0, 0, self._spare_block, 0], ones), attention.device)
        token_ids, positions, blocks, offsets = (
            torch.cat((tensor, rows.expand(*tensor.shape[:-1], extra)), -1)
            for tensor, rows in zip(_tensors(inputs), padding, strict=True)
        )
        return StepInputs(
            token_ids,
            positions,
            blocks,
            offsets,
            replace(
                attention,
                query_starts=np.arange(size + 1),
                context_lens=np.concatenate((attention.context_lens, ones)),
                block_tables=np.concatenate((attention.block_tables, unused)),
                num_decodes=size,
            ),
        )

    def _first(self, inputs: StepInputs) -> Tensor:
        """Compute a step launch by launch, which compiles what needs to be, and record it."""
        attention = inputs.attention
        fixed = FixedDecodes(
            query_starts=attention.query_starts,
            context_lens=attention.context_lens,
            block_tables=attention.block_tables,
            num_decodes=attention.num_decodes,
            block_size=attention.block_size,
            device=attention.device,
            num_groups=attention.num_groups,
            longest=self._longest,
        )
        token_ids, positions, blocks, offsets = (tensor.clone() for tensor in _tensors(inputs))
        own = StepInputs(token_ids, positions, blocks, offsets, fixed)

        def compute() -> Tensor:
            return self._model.forward(own, self._kv_layers)

        hidden = compute()
        if not self._recorded:
            self._addresses = self._now()
        self._recorded[attention.num_decodes] = Recorded(own, fixed, self._record(compute))
        return hidden


def _tensors(inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return inputs.token_ids, inputs.positions, inputs.slot_blocks, inputs.slot_offsets


def cuda_recorder() -> Recorder:
    """Record graphs that share their memory, since no two run at once.

    A memory pool ends with its last graph and cannot be used again. The memory of the pool before
    this one is released.
    """
    torch.cuda.empty_cache()
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
