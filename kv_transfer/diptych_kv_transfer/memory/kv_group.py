"""A group of layers that keep the same of a request's KV."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """How one group keeps the KV of a request."""

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
