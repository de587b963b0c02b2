"""Arrays that came in a message, as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_protocol import Array


def as_tensor(array: Array) -> Tensor:
    """A tensor over the array's own memory; over a copy if that is read-only, as torch has no
    read-only tensors."""
    data = memoryview(array.data)
    buffer = bytearray(data) if data.readonly else data
    return torch.frombuffer(buffer, dtype=getattr(torch, array.dtype)).view(array.shape)
