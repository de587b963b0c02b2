"""The gate of a SwiGLU MLP."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.silu_mul import cpu, reference

__all__ = ["silu_mul"]


def silu_mul(gate_up: Tensor) -> Tensor:
    """`gate_up` [tokens, 2 n] holds the gate in its first half -> [tokens, n]."""
    if gate_up.is_cuda:
        from diptych_kernels.silu_mul import triton

        return triton.silu_mul(gate_up)
    if cpu.fits(gate_up):
        return cpu.silu_mul(gate_up)
    return reference.silu_mul(gate_up)
