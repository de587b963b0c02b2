"""Loads kernels and runs them on torch's threads.

Numba's own thread pools would compete with torch's: the threads of each spin for a while after
every piece of work. So a kernel is a C function that runs in the OpenMP library that torch brings
and uses itself.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import torch

from diptych_kernels.cpu_level import CpuLevel, cpu_level, remembered
from diptych_kernels.native.arguments import Arguments
from diptych_kernels.native.barrier import barrier
from diptych_kernels.native.object_files import object_files

OF_OPENMP = ("omp_get_num_threads", "omp_get_thread_num")
NEVER_CALLED = (
    "NRT_Free", "NRT_MemInfo_call_dtor", "numba_do_raise", "numba_gil_ensure", "numba_gil_release",
    "numba_runtime_build_excinfo_struct", "numba_unpickle",
)  # fmt: skip
"""Functions that compiled code refers to but never calls: Numba adds paths for exceptions and for
memory that a function owns, and kernels have neither. A call would abort the process."""
RUNNING = threading.Lock()
"""The running kernel holds this lock, because all kernels use the same barrier."""
LOADING = threading.Lock()
"""Held while kernels are loaded, so that no two threads compile the same one."""


@cache
def openmp() -> ctypes.CDLL | None:
    """Return the OpenMP library that torch computes with; None if it is not GNU's."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not found:
        return None
    library = ctypes.CDLL(str(found[0]))
    library.GOMP_parallel.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint,
    ]  # fmt: skip
    library.GOMP_parallel.restype = None
    return library


class Kernel:
    """A compiled function of one argument, the address of a record of `native/arguments.py`."""

    def __init__(self, name: str, number: int, level: CpuLevel) -> None:
        """Load `entry(number)` of a module in `compiled/`, compiled for a level, at its first use.

        Raises `RuntimeError` if torch brings no GNU OpenMP library.
        """
        library = openmp()
        if library is None:
            raise RuntimeError("torch has no libgomp beside it: there are no threads to run on")
        self.name, self.number, self.level = name, number, level
        self.file = f"{name}-{number}"
        self.library = library
        self.linker: Any = None
        """Holds the code when it is loaded."""
        self._run = library.GOMP_parallel

    @cached_property
    def address(self) -> int:
        """The function's address. Loads the kernel if necessary, and raises as `load`."""
        load([self])
        address: int = self.linker.get_function_address("kernel")
        return address

    def run(self, arguments: Arguments, threads: int) -> None:
        """Let this many threads call the function together, and return when all have."""
        with RUNNING:
            self._run(self.address, ctypes.byref(arguments), threads, 0)


def load(kernels: Sequence[Kernel]) -> None:
    """Load kernels of one level. Those that no earlier process left are compiled together.

    Raises `RuntimeError` if the compiler fails.
    """
    with LOADING:
        waiting = [kernel for kernel in kernels if kernel.linker is None]
        if waiting:
            files = object_files([kernel.file for kernel in waiting], waiting[0].level)
            for kernel, compiled in zip(waiting, files, strict=True):
                kernel.linker = _linker(kernel.library, compiled)


@remembered
def kernel_of(name: str, number: int) -> Kernel:
    """Return the kernel of this name and number for the level in use. It is not loaded yet."""
    return _kernel(name, number, cpu_level())


@cache
def _kernel(name: str, number: int, level: CpuLevel) -> Kernel:
    """Kept for good: tables hold addresses of kernels, whichever level is in use by now."""
    return Kernel(name, number, level)


Call = tuple[Kernel, Arguments]
"""A kernel and its arguments. What these point to must stay while it runs."""


@cache
def bits_of(value: float) -> int:
    """Return a float32 as an integer argument, which the kernel's `float_of` converts back."""
    bits: int
    [bits] = struct.unpack("i", struct.pack("f", value))
    return bits


def _linker(library: ctypes.CDLL, compiled: bytes) -> llvm.ExecutionEngine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name in OF_OPENMP:
        llvm.add_symbol(name, ctypes.cast(library[name], ctypes.c_void_p).value)
    llvm.add_symbol("await_others", barrier().get_function_address("await_others"))
    for name in NEVER_CALLED:
        llvm.add_symbol(name, ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value)
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(compiled))
    engine.finalize_object()
    return engine
