"""Prepares the process for a model on this processor, before its first step."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import re
import subprocess
import time
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Final

import torch

from diptych_kernels.call_table import WIDTH
from diptych_kernels.cpu_kernels import CASES
from diptych_kernels.cpu_level import CpuLevel, CpuLevelError, cpu_level, machine_level, use_level
from diptych_kernels.native.kernel import kernel_of, load
from diptych_kernels.native.tile_layout import BF16, LEVEL_BITS
from diptych_kernels.paged_attention.cpu import fills_vectors, number_of
from diptych_kernels.trust import is_there, is_trusted
from diptych_protocol import EngineConfig, InvalidRequestError

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""From glibc's malloc.h."""
START_LIBRARIES = ("/torch/lib/", "/libllvmlite.so")
"""Parts of paths: of these libraries a start reads far more than a step. No process unloads them,
so that nothing else can come to their addresses."""
MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) r-.p .*?(/.*)\n"
    r"(?:[A-Z].*\n)*?Anonymous: +0 kB\n(?:[A-Z].*\n)*?Swap: +0 kB$",
    re.MULTILINE,
)
"""In /proc/PID/smaps: pages of a file that this process neither has changed nor can change. Changed
ones (a linker's relocations) are anonymous, or swapped out."""


def keep_freed_memory() -> None:
    """Make glibc keep a step's freed memory: page faults for allocating it again cost more than the
    step of a small model. All threads share it, so that `give_freed_memory_back` finds all of it:
    glibc returns nothing of what is free at the end of another thread's own memory. Threads that
    run already keep theirs. Other C libraries stay as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # glibc accepts no more
        mallopt(M_TRIM_THRESHOLD, 512 << 20)
        mallopt(M_ARENA_MAX, 1)


def give_freed_memory_back() -> None:
    """Return to the kernel free memory, and pages of libraries that come again when they are used,
    after an event that will not occur again soon."""
    library = ctypes.CDLL(None)
    trim = getattr(library, "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)
    with contextlib.suppress(OSError):  # not Linux
        for first, size in start_pages():
            library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


@cache
def start_pages() -> list[tuple[int, int]]:
    """Addresses and sizes of what `START_LIBRARIES` have mapped. They stay true as long as the
    process lives, and the kernel takes 20 ms to write down what it has."""
    found = MAPPING.findall(Path("/proc/self/smaps").read_text())
    return [
        (int(start, 16), int(end, 16) - int(start, 16))
        for start, end, path in found
        if any(part in path for part in START_LIBRARIES)
    ]


def choose_level(config: EngineConfig) -> CpuLevel:
    """Choose the level of this process's kernels. Raises `InvalidRequestError` if it does not
    exist."""
    try:
        return use_level(config.cpu_level)
    except CpuLevelError as exc:
        raise InvalidRequestError(str(exc), param="cpu_level") from exc


class CpuKernels:
    """The kernels for a model on a CPU. They are loaded, or compiled, beside other work until
    `try_all`."""

    def __init__(
        self, kv_dtype: torch.dtype, head_dim: int, *, packed: bool, floats: bool, in_bytes: bool
    ) -> None:
        """packed, floats: the model's matrices may be levels, or bfloat16. in_bytes: products round
        to 8 bits."""
        wanted = _wanted(kv_dtype, head_dim, packed) + FOR_FLOATS * floats + FOR_BYTES * in_bytes
        self._names = [each for each in wanted if is_there(each[0])]
        self._thread = Thread(target=self._load, name="kernels", daemon=True)
        self._thread.start()

    def try_all(self) -> None:
        """Compare each with its reference, and disable and log those that differ."""
        self._thread.join()
        started = time.monotonic()
        trusted = [is_trusted(CASES[name], number) for name, number in self._names]
        log.info(
            "CPU level %s, which this machine has%s; %d of %d kernels tried are right, in %.0f ms",
            cpu_level().word,
            "" if cpu_level() is machine_level() else f" up to {machine_level().word}",
            sum(trusted),
            len(trusted),
            (time.monotonic() - started) * 1e3,
        )

    def _load(self) -> None:
        # What goes wrong here goes wrong again when they are tried, one by one, and is told there.
        with contextlib.suppress(RuntimeError, OSError, subprocess.SubprocessError):
            load([kernel_of(name, number) for name, number in self._names])


FOR_FLOATS: Final = [("float_product", BF16), ("float_rows", BF16)]
"""Kernels for bfloat16; those for rarer types are loaded when they are used."""
FOR_BYTES: Final = [("byte_product", bits) for bits in LEVEL_BITS]
"""Kernels for activations of 8 bits."""


def _wanted(kv_dtype: torch.dtype, head_dim: int, packed: bool) -> list[tuple[str, int]]:
    """Names and numbers, whether or not the level in use has them."""
    number = number_of(head_dim)
    wanted = [("rms_norm", 0), ("rope_kv_write", 0), ("silu_mul", 0), ("decode_attention", number)]
    if fills_vectors(head_dim):
        wanted.append(("prefill_attention", head_dim))
        if kv_dtype is torch.bfloat16:
            wanted.append(("bf16_decode_attention", number))
        if packed and is_there("amx_attention"):
            wanted.append(("amx_attention", head_dim))
        elif kv_dtype is torch.bfloat16:
            wanted.append(("bf16_prefill_attention", head_dim))
    if packed:
        wanted.append(("run_calls", WIDTH))
        products = "packed_product", "packed_rows", "amx_product"
        wanted += [(name, bits) for name in products for bits in LEVEL_BITS]
    return wanted
