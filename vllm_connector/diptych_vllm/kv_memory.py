"""Describes vLLM's KV memory for the hinge, and what must be equal in engines that exchange KV.

vLLM has one tensor for each layer. Its first axis counts the blocks, so a block of the engine is
one part of each tensor. Layers of different KV cache groups have the same memory: each block is one
group's. So the hinge treats each memory as a shard, and moves a block of any group in the same way.
The content of a block does not matter, as long as both engines store it in the same way, except for
the heads: vLLM's tensors are [num_blocks, heads, block_size, content], and engines with other
numbers of ranks have other numbers of heads. On vLLM's CPU backend the content is 2 * head_dim
numbers, with the keys transposed; `compat` has the shape.

Blocks on a device are copied through the host's memory. With the setting `staging`, so are those of
the host, so that this path can be tested without a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from diptych_kv_transfer.memory.shard import DeviceCopies, MemoryKind, MemoryRegion, Shard
from diptych_protocol import InvalidRequestError, fingerprint
from diptych_protocol.config import Staging
from diptych_vllm.ranks import Ranks

PARAM = "kv_caches"
HEADS_FIRST: Final = ("LBHNC", "BLHNC")
"""vLLM's names of the layouts in which each head of a block is contiguous. The letters name the
axes from the outermost one on: layers, blocks, heads, tokens (N) and content."""
DEVICES: Final = ("cpu", "cuda")
"""Types of devices whose memory the hinge reaches, as torch names them."""
MAX_NAME = 256
"""Longest value in `compat`, in characters."""


class KVTensor(Protocol):
    """The needed part of a torch tensor."""

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


def needs_copies(layers: Mapping[str, KVTensor], staging: Staging) -> bool:
    """Whether the hinge can access the layers' KV only through copies.

    Raises `InvalidRequestError` if it cannot access them at all, naming the layer.
    """
    if not layers:
        raise InvalidRequestError("this model has no KV to hand over", param=PARAM)
    first = str(next(iter(layers.values())).device)
    for name, tensor in layers.items():
        device = str(tensor.device)
        if device.partition(":")[0] not in DEVICES:
            raise InvalidRequestError(
                f"the KV of layer {name} is on {device}, and the connector reaches only "
                f"{' and '.join(DEVICES)}",
                param=PARAM,
            )
        if device != first:
            raise InvalidRequestError(
                f"the KV of layer {name} is on {device}, and that of another layer on {first}: "
                "the connector reaches one device",
                param=PARAM,
            )
    return staging == "always" or first != "cpu"


def shards_of(
    layers: Mapping[str, KVTensor],
    num_blocks: int,
    copies: Mapping[str, DeviceCopies] | None = None,
) -> list[Shard]:
    """Return how the hinge accesses the layers' KV, each [num_blocks, ...]: on the host in place,
    or through the layer's copies. Layers that have the same memory have one shard.

    Raises `InvalidRequestError` for memory that it cannot access, naming the layer.
    """
    shards: dict[int, Shard] = {}
    for name, tensor in layers.items():
        if tensor.shape[0] != num_blocks or not (copies or tensor.is_contiguous()):
            raise InvalidRequestError(
                f"the KV of layer {name} has the shape {tuple(tensor.shape)}, and not "
                f"{num_blocks} blocks that are contiguous",
                param=PARAM,
            )
        kind = MemoryKind.DEVICE if copies else MemoryKind.HOST
        region = MemoryRegion(tensor.data_ptr(), tensor.nbytes, kind, str(tensor.device), tensor)
        shard = Shard(region, tensor.nbytes // num_blocks, copies[name] if copies else None)
        if shards.setdefault(region.address, shard).region.length != region.length:
            raise InvalidRequestError(
                f"the KV of layer {name} shares memory with a layer of another size", param=PARAM
            )
    return list(shards.values())


def heads_come_first(layers: Mapping[str, KVTensor], layout: str, ranks: Ranks) -> bool:
    """Whether a block consists of `ranks.local_heads` equal heads one after the other. `layout`:
    vLLM's name of the layout."""
    fit = [len(x.shape) == 4 and x.shape[1] == ranks.local_heads for x in layers.values()]
    return layout in HEADS_FIRST and all(fit)


def compat_of(
    layers: Mapping[str, KVTensor], facts: Mapping[str, str | int], ranks: Ranks
) -> dict[str, str | int]:
    """Return everything that must be equal in engines that exchange this KV.

    facts: the model's and vLLM's configuration. A value that is too long for the wire is replaced
    by its fingerprint. The number of ranks may differ, so blocks are described as at one rank.
    """
    blocks = [(name, _whole_block(x, ranks), str(x.dtype)) for name, x in layers.items()]
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


def _whole_block(tensor: KVTensor, ranks: Ranks) -> tuple[str | int, ...]:
    """The shape of a block if one rank had all heads. A layer whose heads are not shared out as the
    model's are is the same only in engines with as many ranks."""
    if len(tensor.shape) == 3 and ranks.heads == 1:  # with MLA there need not be an axis of heads
        return ranks.heads, *tensor.shape[1:]
    heads, *rest = tensor.shape[1:]
    if ranks.divides_heads and heads == ranks.local_heads:
        return ranks.heads, *rest
    return f"{heads} of {ranks.num_ranks} ranks", *rest


def _short(value: str | int) -> str | int:
    if isinstance(value, str) and len(value) > MAX_NAME:
        return fingerprint({"": value})
    return value
