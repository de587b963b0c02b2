"""Copies results from the device without blocking."""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """Tensors that are being copied to the host. On a CPU there is no copy."""

    def __init__(self, *tensors: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            pinned = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
            for target, source in zip(pinned, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._done = torch.cuda.current_stream(tensors[0].device).record_event()
            tensors = tuple(pinned)
        self._tensors = tensors

    def read(self) -> tuple[Tensor, ...]:
        """Wait for the tensors and return them."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensors
