"""Rotary position embedding."""

from diptych_kernels.rope.reference import rotate_

__all__ = ["rotate_"]
