"""The layout of an engine's KV memory: blocks of tokens, whose heads are divided among ranks.

A rank's block is [num_layers, 2 (key, value), block_size, heads, head_dim], contiguous. The model
sets all of that but `block_size` and the number of ranks, which may differ between two engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from diptych_protocol.engine_settings import MAX_RANKS

GEOMETRY: Final = ("block_size", "tensor_parallel_size")
"""The fields in which engines that exchange KV may differ."""
MAX_BLOCK_SIZE: Final = 4096
"""Limit on the tokens of a block. No engine uses larger blocks, and what a peer says of itself must
not make us reserve more memory."""
ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one engine's KV memory."""

    num_layers: int
    kv_heads: int
    """Number of KV heads of the model."""
    row_bytes: int
    """Size, in bytes, of one token's key (or value) in one head."""
    block_size: int
    """Number of tokens per block."""
    num_ranks: int

    @classmethod
    def of(cls, compat: Mapping[str, str | int], geometry: Mapping[str, int]) -> Layout | None:
        """Read a layout from an engine's description; None if that is not a possible one, or
        blocks hold KV of a draft model too."""
        if "draft_model" in compat:
            return None
        layers, heads, head_dim = (
            _positive(compat, name) for name in ("num_layers", "kv_heads", "head_dim")
        )
        block_size, ranks = (_positive(geometry, name) for name in GEOMETRY)
        row_bytes = head_dim * ITEM_BYTES.get(str(compat.get("dtype")), 0)
        if not layers * heads * row_bytes * block_size * ranks:
            return None
        if block_size > MAX_BLOCK_SIZE or ranks > MAX_RANKS or set(geometry) != set(GEOMETRY):
            return None
        if heads % ranks and ranks % heads:
            return None
        return cls(layers, heads, row_bytes, block_size, ranks)

    @property
    def local_heads(self) -> int:
        """The number of heads of each rank."""
        return max(1, self.kv_heads // self.num_ranks)

    @property
    def block_bytes(self) -> int:
        """Size, in bytes, of one rank's part of a block."""
        return self.num_layers * 2 * self.block_size * self.local_heads * self.row_bytes

    def heads_of(self, rank: int) -> range:
        """Return the heads of a rank. With more ranks than heads, several have the same head."""
        first = rank * self.kv_heads // self.num_ranks
        return range(first, first + self.local_heads)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _positive(values: Mapping[str, str | int], name: str) -> int:
    """The value of a field; 0 if it is missing or makes no sense."""
    value = values.get(name)
    return value if isinstance(value, int) and value > 0 else 0


@dataclass(frozen=True, slots=True)
class KVGroup:
    """How a group of layers keeps the KV of a request: alike in all of them."""

    block_size: int
    """Number of tokens in a block."""
    window: int | None = None
    """How many tokens a token attends to, including itself. None: all."""

    def kept(self, num_tokens: int) -> range:
        """Return the positions, in the request's list, of the blocks that the token after the first
        `num_tokens` ones attends to."""
        outside = 0 if self.window is None else max(0, num_tokens + 1 - self.window)
        return range(outside // self.block_size, -(-num_tokens // self.block_size))

    def __str__(self) -> str:
        return f"{self.block_size}" if self.window is None else f"{self.block_size}/{self.window}"
