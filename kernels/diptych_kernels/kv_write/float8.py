"""The 8-bit float in which a KV cache may be kept: e4m3, 4 bits of exponent and 3 of mantissa."""

from __future__ import annotations

from typing import Final

import torch

FLOAT8: Final = torch.float8_e4m3fn
FLOAT8_MAX: Final = 448.0
"""Larger numbers are stored as this one; the format has no infinity."""
