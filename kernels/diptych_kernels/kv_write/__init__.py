"""Scatter of new keys and values into the paged KV cache."""

from diptych_kernels.kv_write.reference import kv_write

__all__ = ["kv_write"]
