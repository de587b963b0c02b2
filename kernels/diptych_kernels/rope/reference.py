"""Rotary embedding in the interleaved layout.

The pair (2i, 2i+1) of a head is one complex number, multiplied by cos(p f_i) + i sin(p f_i) for
position p. Models published in the half-split layout (pairs i and i + head_dim / 2) have the rows
of their query and key projections reordered when they are loaded; scores depend only on pairs, so
attention is the same, and the rotation is a single multiplication in place.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_(heads: Tensor, rotations: Tensor) -> None:
    """Rotate query and key heads in place.

    heads: [tokens, heads, head_dim], last dimension contiguous, any other strides.
    rotations: [tokens, 1, head_dim / 2, 2] float32, the (cos, sin) of each token's position.
    """
    factors = torch.view_as_complex(rotations)
    pairs = heads.view(*heads.shape[:-1], -1, 2)
    if heads.dtype is torch.float32:
        torch.view_as_complex(pairs).mul_(factors)
    else:
        rotated = torch.view_as_complex(pairs.float()).mul_(factors)
        pairs.copy_(torch.view_as_real(rotated))
