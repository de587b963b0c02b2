"""Attention of a mixed batch (prefill chunks and decodes) over the paged KV cache."""

from diptych_kernels.paged_attention.metadata import AttentionMetadata
from diptych_kernels.paged_attention.reference import paged_attention

__all__ = ["AttentionMetadata", "paged_attention"]
