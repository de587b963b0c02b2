"""vLLM's KV memory as the hinge sees it, and what must be equal in engines that exchange it.

vLLM has one tensor for each layer. Its first axis counts the blocks, so a block of the engine is
one part of each tensor. Layers of different KV cache groups have the same memory: each block is one
group's. So the hinge takes each memory for a shard, and moves a block of any group in the same way.
What is inside a block is nobody's affair, as long as both engines keep it in the same way. On
vLLM's CPU backend it is [heads, block_size, 2 * head_dim], with the keys transposed; `compat` has
the shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from diptych_kv_transfer.memory.region import MemoryRegion
from diptych_kv_transfer.memory.shard import Shard
from diptych_protocol import InvalidRequestError, fingerprint

PARAM = "kv_caches"
MAX_NAME = 256
"""Longest value in `compat`, in characters."""


class KVTensor(Protocol):
    """What is needed of a torch tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...
    @property
    def device(self) -> object: ...
    @property
    def nbytes(self) -> int: ...
    def data_ptr(self) -> int:
        """Address of the first byte."""

    def is_contiguous(self) -> bool:
        """Whether its elements lie one after the other, in order."""


def shards_of(layers: Mapping[str, KVTensor], num_blocks: int) -> list[Shard]:
    """How the hinge reaches the layers' KV, each [num_blocks, ...] on the host. Layers that have
    the same memory have one shard.

    Raises `InvalidRequestError` for memory that it does not reach, naming the layer.
    """
    if not layers:
        raise InvalidRequestError("this model has no KV to hand over", param=PARAM)
    shards: dict[int, Shard] = {}
    for name, tensor in layers.items():
        if str(tensor.device) != "cpu":
            raise InvalidRequestError(
                f"the KV of layer {name} is on {tensor.device}, and only vLLM's CPU backend was "
                "tested",
                param=PARAM,
            )
        if tensor.shape[0] != num_blocks or not tensor.is_contiguous():
            raise InvalidRequestError(
                f"the KV of layer {name} has the shape {tuple(tensor.shape)}, and not "
                f"{num_blocks} blocks that are contiguous",
                param=PARAM,
            )
        region = MemoryRegion(tensor.data_ptr(), tensor.nbytes, owner=tensor)
        known = shards.setdefault(region.address, Shard(region, tensor.nbytes // num_blocks))
        if known.region.length != region.length:
            raise InvalidRequestError(
                f"the KV of layer {name} shares memory with a layer of another size", param=PARAM
            )
    return list(shards.values())


def compat_of(
    layers: Mapping[str, KVTensor], facts: Mapping[str, str | int]
) -> dict[str, str | int]:
    """Everything that must be equal in engines that exchange this KV.

    facts: what the model and vLLM's configuration say. A value that is too long for the wire is
    replaced by its fingerprint.
    """
    blocks = [(name, tuple(x.shape[1:]), str(x.dtype)) for name, x in layers.items()]
    shape, dtype = blocks[0][1:]
    memories = list(dict.fromkeys(x.data_ptr() for x in layers.values()))
    shards = {name: memories.index(x.data_ptr()) for name, x in layers.items()}
    compat = {
        **facts,
        "num_layers": len(blocks),
        "block": " ".join(map(str, shape)),
        "dtype": dtype,
        "num_tensors": len(memories),
        "layers": fingerprint(
            {name: [list(shape), dtype, shards[name]] for name, shape, dtype in blocks}
        ),
    }
    return {name: _short(value) for name, value in compat.items()}


def _short(value: str | int) -> str | int:
    if isinstance(value, str) and len(value) > MAX_NAME:
        return fingerprint({"": value})
    return value
