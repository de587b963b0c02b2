"""Converts arrays from a message to tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_protocol import Array


def as_tensor(array: Array) -> Tensor:
    """Return a tensor over the array's own memory, or over a copy if that is read-only, because
    torch has no read-only tensors."""
    data = memoryview(array.data)
    buffer = bytearray(data) if data.readonly else data
    return torch.frombuffer(buffer, dtype=getattr(torch, array.dtype)).view(array.shape)
