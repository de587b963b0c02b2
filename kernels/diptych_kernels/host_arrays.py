"""Arrays of the host on their way to a device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """An array as a tensor on the device; on a CPU the same memory."""
    return ready_to_go(array, device).to(device, non_blocking=True)


def ready_to_go(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """An array as a tensor on the host, to be copied to the device without waiting for it: a GPU
    does that only from pinned memory, which torch keeps until the copy is done."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
