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


def compile_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> Thread:
    """Begin to compile, or to load, the kernels that a model will call; join before its first step.

    What goes wrong in the thread goes wrong again in that step, and is told there.
    """
    thread = Thread(target=_compile, args=(device, dtype, head_dim), name="kernels", daemon=True)
    thread.start()
    return thread


def _compile(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    if device.type == "cpu" and dtype is torch.float32:
        from diptych_kernels.native.kernel import openmp
        from diptych_kernels.paged_attention import cpu as paged_attention
        from diptych_kernels.rope_kv_write import cpu as rope_kv_write

        if openmp() is not None:
            paged_attention.decode_kernel(head_dim)
            rope_kv_write.kernel()
