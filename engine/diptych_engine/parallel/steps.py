"""The messages between the lead of a tensor-parallel group and its workers.

lead -> worker   [kind, msgpack payload, *bytes of arrays]
    STEP   StepMessage; not answered: the sums are the answer
    CALL   WorkerCall, answered with an Answer
    STOP   no payload
worker -> lead   [msgpack Answer, *bytes of arrays]
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.lora.bank import LoraBank
from diptych_engine.models import StepInputs
from diptych_engine.models.interface import GivenEmbeddings
from diptych_engine.models.wire_arrays import as_tensor
from diptych_kernels.paged_attention import AttentionMetadata
from diptych_protocol import Array
from diptych_protocol.arrays import Frame, FrameDecoder, FrameEncoder

STARTED: Final = 0
"""Call id of the message by which a worker reports that it has loaded its share. Ids of calls are
positive."""
FAILED: Final = -1
"""Call id of a worker's last message: it cannot continue."""


class Kind(enum.Enum):
    STEP = b"\x00"
    CALL = b"\x01"
    STOP = b"\x02"


class StepMessage(msgspec.Struct, array_like=True, gc=False):
    """`StepInputs`, and the blocks to clear before.

    Arrays are int64, except the given embeddings.
    """

    fresh_blocks: list[int]
    token_ids: Array
    positions: Array
    slot_blocks: Array
    slot_offsets: Array
    query_starts: Array
    context_lens: Array
    block_tables: Array
    num_decodes: int
    block_size: int
    given_rows: Array | None
    given_values: Array | None
    adapters: list[tuple[int, Array | None]]
    """Ids of adapters, and the tokens that use them; None: all."""
    num_groups: int

    @classmethod
    def of(cls, inputs: StepInputs, fresh_blocks: list[int]) -> StepMessage:
        attention = inputs.attention
        return cls(
            fresh_blocks,
            _array(inputs.token_ids),
            _array(inputs.positions),
            _array(inputs.slot_blocks),
            _array(inputs.slot_offsets),
            _array(torch.from_numpy(attention.query_starts)),
            _array(torch.from_numpy(attention.context_lens)),
            _array(torch.from_numpy(attention.block_tables)),
            attention.num_decodes,
            attention.block_size,
            None if inputs.given is None else _array(inputs.given.rows),
            None if inputs.given is None else _array(inputs.given.values),
            [
                (adapter.lora_int_id, None if adapter.rows is None else _array(adapter.rows))
                for adapter in inputs.adapters
            ],
            attention.num_groups,
        )

    def inputs(self, device: torch.device, loras: LoraBank) -> StepInputs:
        def tensor(array: Array) -> Tensor:
            return as_tensor(array).to(device)

        given = None
        if self.given_rows is not None and self.given_values is not None:
            given = GivenEmbeddings(tensor(self.given_rows), tensor(self.given_values))
        return StepInputs(
            token_ids=tensor(self.token_ids),
            positions=tensor(self.positions),
            slot_blocks=tensor(self.slot_blocks),
            slot_offsets=tensor(self.slot_offsets),
            attention=AttentionMetadata(
                query_starts=_numpy(self.query_starts),
                context_lens=_numpy(self.context_lens),
                block_tables=_numpy(self.block_tables),
                num_decodes=self.num_decodes,
                block_size=self.block_size,
                device=device,
                num_groups=self.num_groups,
            ),
            adapters=[
                loras.rows(lora_int_id, None if rows is None else tensor(rows))
                for lora_int_id, rows in self.adapters
            ],
            given=given,
        )


class WorkerCall(msgspec.Struct, array_like=True, gc=False):
    """Run a method of the worker."""

    call_id: int
    method: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    arrays: list[Array] | None = None
    """The name of the keyword argument that this replaces; it would lose its type
    among the others."""


class Answer(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The outcome of a call; a failure means there is no result."""

    call_id: int
    result: Any = None
    failure: str | None = None
    invalid: bool = False
    """Whether the caller is at fault for the failure."""


encoder = FrameEncoder()
step_decoder = FrameDecoder(StepMessage)
call_decoder = FrameDecoder(WorkerCall)
answer_decoder = FrameDecoder(Answer)


def frames_of(kind: Kind, message: StepMessage | WorkerCall | None = None) -> list[Frame]:
    return [kind.value, *(encoder.encode(message) if message is not None else ())]


def endpoint(directory: Path, rank: int) -> str:
    """Return the endpoint at which the lead listens for a worker."""
    return f"ipc://{directory}/rank-{rank}"


def _array(values: Tensor) -> Array:
    values = values.cpu().contiguous()
    data = values.reshape(-1).view(torch.uint8).numpy().data
    return Array(str(values.dtype).removeprefix("torch."), tuple(values.shape), data)


def _numpy(array: Array) -> NDArray[np.int64]:
    indices: NDArray[np.int64] = as_tensor(array).numpy()
    return indices
