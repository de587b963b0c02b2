"""The call of the kernel for rotation and cache write."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.cpu_level import remembered
from diptych_kernels.native.arguments import RopeKvWrite, places_of
from diptych_kernels.native.kernel import Call, Kernel, bits_of, kernel_of

CACHE, BIAS, QUERY_NORM, KEY_NORM = places_of(
    RopeKvWrite, "cache", "bias", "query_norm", "key_norm"
)
"""Positions, in a table's row, of the addresses that differ from layer to layer."""


def call(
    heads: Tensor,
    rotations: Tensor,
    kv_layer: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> Call:
    """Return the call. For another layer, replace these addresses by that layer's."""
    tokens, num_heads, head_dim = heads.shape
    arguments = RopeKvWrite(
        heads=heads.data_ptr(),
        rotations=rotations.data_ptr(),
        cache=kv_layer.data_ptr(),
        blocks=blocks.data_ptr(),
        offsets=offsets.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        query_norm=0 if query_norm is None else query_norm.data_ptr(),
        key_norm=0 if key_norm is None else key_norm.data_ptr(),
        eps=bits_of(eps),
        tokens=tokens,
        num_heads=num_heads,
        kv_heads=kv_layer.shape[3],
        head_dim=head_dim,
        block_size=kv_layer.shape[2],
        block_stride=kv_layer.stride(0) * kv_layer.itemsize,
        item=kv_layer.itemsize,
    )
    return kernel(), arguments


@remembered
def kernel() -> Kernel:
    """Return the kernel; it is loaded at first use."""
    return kernel_of("rope_kv_write", 0)
