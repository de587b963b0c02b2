"""Rotary position embedding, with bias and norms for models that have them, and the cache write of
the rotated keys."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.rope_kv_write import cpu, reference

__all__ = ["rope_kv_write"]


def rope_kv_write(
    heads: Tensor,
    rotations: Tensor,
    kv_layer: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    kv_scale: float = 1.0,
    bias: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate the query heads in place; store the rotated keys and the values.

    Before that, add `bias` [(query_heads + 2 kv_heads) * head_dim], then normalise each query head
    and each key head as `rms_norm` does, with weights [head_dim], where these are given.

    heads: [tokens, query_heads + 2 kv_heads, head_dim], contiguous: the queries, then the keys,
        then the values. What the key heads hold afterwards is not defined.
    rotations: [tokens, 1, head_dim / 2, 2] float32, the (cos, sin) of each token's position.
    kv_layer, blocks, offsets, kv_scale: as `reference.kv_write` takes them.
    """
    if heads.is_cuda:
        from diptych_kernels.rope_kv_write import triton

        triton.rope_kv_write(
            heads, rotations, kv_layer, blocks, offsets, kv_scale, bias, query_norm, key_norm, eps
        )
    elif cpu.fits(heads, kv_layer):
        cpu.rope_kv_write(
            heads, rotations, kv_layer, blocks, offsets, bias, query_norm, key_norm, eps
        )
    else:
        reference.rope_kv_write(
            heads, rotations, kv_layer, blocks, offsets, kv_scale, bias, query_norm, key_norm, eps
        )
