"""What a model wants of the processor that it runs on, before its first step."""

from __future__ import annotations

import ctypes
from threading import Thread

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""


def keep_freed_memory() -> None:
    """Ask glibc not to hand a step's temporaries back to the kernel: the page faults of getting
    them again cost more than the step of a small model. Other C libraries are left as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # glibc accepts no more
        mallopt(M_TRIM_THRESHOLD, 512 << 20)


def give_freed_memory_back() -> None:
    """Hand to the kernel what is free, after an event that will not soon come again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)


def compile_kernels(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    *,
    packed: bool,
) -> Thread:
    """Begin to compile, or to load, the kernels that a model will call; join before its first step.

    What goes wrong in the thread goes wrong again in that step, and is told there.
    """
    args = device, dtype, kv_dtype, head_dim, packed
    thread = Thread(target=_compile, args=args, name="kernels", daemon=True)
    thread.start()
    return thread


def _compile(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, packed: bool
) -> None:
    if device.type == "cpu" and dtype is torch.float32:
        from diptych_kernels import call_table
        from diptych_kernels.cpu_features import has_matrix_unit
        from diptych_kernels.native.kernel import load, openmp
        from diptych_kernels.packed_product import cpu as packed_product
        from diptych_kernels.paged_attention import cpu as paged_attention
        from diptych_kernels.rms_norm import cpu as rms_norm
        from diptych_kernels.rope_kv_write import cpu as rope_kv_write
        from diptych_kernels.silu_mul import cpu as silu_mul

        if openmp() is not None:
            kernels = [small.kernel() for small in (rms_norm, rope_kv_write, silu_mul)]
            kernels.append(paged_attention.decode_kernel(head_dim, kv_dtype))
            has_chunks = paged_attention.has_kernels(head_dim)
            if has_chunks:
                kernels.append(paged_attention.prefill_kernel(head_dim))
            if packed:
                kernels.append(call_table.run_calls())
                kernels += [packed_product.decode_kernel(bits) for bits in (4, 8)]
            if packed and has_matrix_unit():
                kernels += [packed_product.chunk_kernel(bits) for bits in (4, 8)]
                if has_chunks:
                    kernels.append(paged_attention.chunk_kernel(head_dim))
            load(kernels)
