"""The gate of a SwiGLU MLP."""

from diptych_kernels.silu_mul.reference import silu_mul

__all__ = ["silu_mul"]
