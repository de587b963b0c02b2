"""Moves arrays from the host to a device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return an array as a tensor on the device; on a CPU it shares the memory."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    # Only from pinned memory, which torch keeps until it is read, does a GPU copy without making
    # the host wait.
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
