"""The packed product with inputs that are rounded to 8 bits, for processors that multiply bytes."""

from __future__ import annotations

from diptych_kernels.native.compiled import packed_product


def entry(bits):
    """Return the kernel for a matrix whose levels have 4, 6 or 8 bits."""
    return packed_product.entry(bits, size=1)
