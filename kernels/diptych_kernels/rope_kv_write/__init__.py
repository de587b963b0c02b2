"""Rotary position embedding, and the cache write of the keys that it rotated."""

from diptych_kernels.rope_kv_write.reference import rope_kv_write

__all__ = ["rope_kv_write"]
