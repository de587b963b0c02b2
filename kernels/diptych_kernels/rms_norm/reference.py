"""y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise `x` [..., n] by its root mean square and scale it by `weight` [n]."""
    return F.rms_norm(x, weight.shape, weight, eps)
