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
from diptych_kernels.native.object_files import object_files

SPINS = 1000
"""How often a thread spins, for about ten nanoseconds each, before it yields the processor. Threads
that really run wait for each other about as long."""
TEXT = """
declare i32 @omp_get_num_threads()
declare i32 @sched_yield()
declare void @llvm.x86.sse2.pause()

@arrived = internal global i64 0, align 64
@round = internal global i64 0, align 64

define void @await_others() {{
    %threads = call i32 @omp_get_num_threads()
    %last = sext i32 %threads to i64
    %own_round = load atomic i64, ptr @round acquire, align 8
    %before = atomicrmw add ptr @arrived, i64 1 acq_rel
    %count = add i64 %before, 1
    %is_last = icmp eq i64 %count, %last
    br i1 %is_last, label %release, label %wait

release:
    store atomic i64 0, ptr @arrived monotonic, align 8
    %next_round = add i64 %own_round, 1
    store atomic i64 %next_round, ptr @round release, align 8
    ret void

wait:
    %spins = phi i64 [0, %0], [%more, %spin], [%spins, %yield]
    %current = load atomic i64, ptr @round acquire, align 8
    %released = icmp ne i64 %current, %own_round
    br i1 %released, label %end, label %again

again:
    %is_long = icmp eq i64 %spins, {spins}
    br i1 %is_long, label %yield, label %spin

spin:
    call void @llvm.x86.sse2.pause()  ; tells the processor that its thread only waits
    %more = add i64 %spins, 1
    br label %wait

yield:
    %ignored = call i32 @sched_yield()
    br label %wait

end:
    ret void
}}
"""


@cache
def barrier() -> llvm.ExecutionEngine:
    """Return a module with the function `await_others`, by which the threads of a kernel wait for
    each other, some hundred times per step. The linker must know `omp_get_num_threads`.

    GOMP's own barrier spins for milliseconds. Where other work keeps a processor busy, Linux may
    put two of a kernel's threads on the same one: then each waits at every barrier until the
    other's time slice is over, and a step takes a second. This one spins for some microseconds, and
    then lets whoever else wants the processor go first.

    There is one barrier, so kernels must run one after the other.
    """
    sched_yield = ctypes.CDLL(None).sched_yield
    llvm.add_symbol("sched_yield", ctypes.cast(sched_yield, ctypes.c_void_p).value)
    text = TEXT.format(spins=SPINS)
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
    engine.finalize_object()
    return engine


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
