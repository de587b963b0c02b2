"""Loads kernels and runs them on the threads that torch computes with.

Numba's own thread pools would compete with torch's: the threads of each spin for a while after
every piece of work. So a kernel is a C function that is handed to the OpenMP library that torch
brings along and uses itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import llvmlite.binding as llvm
import torch

from diptych_kernels.native.barrier import barrier

log = logging.getLogger(__name__)

OF_OPENMP = ("omp_get_num_threads", "omp_get_thread_num")
NEVER_CALLED = (
    "NRT_Free", "NRT_MemInfo_call_dtor", "numba_do_raise", "numba_gil_ensure", "numba_gil_release",
    "numba_runtime_build_excinfo_struct", "numba_unpickle",
)  # fmt: skip
"""Numba's compiler adds paths for exceptions and for memory that a function owns; a kernel raises
nothing and owns none. If it did, the process would be aborted."""
COMPILE_TIMEOUT_S = 300.0
RUNNING = threading.Lock()
"""Held by the kernel that runs: all of them wait at the same barrier."""


@cache
def openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch computes with; None if it is not GNU's."""
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
    """A compiled function of one argument, the address of int64 numbers."""

    def __init__(self, name: str, number: int) -> None:
        """`entry(number)` of a module beside this one, as an earlier process left it or compiled
        now.

        Raises `RuntimeError` if torch brings no OpenMP library of GNU's, or if the compiler fails.
        """
        library = openmp()
        if library is None:
            raise RuntimeError("torch has no libgomp beside it: there are no threads to run on")
        self._run = library.GOMP_parallel
        self._engine = _linker(library)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(object_file(name, number)))
        self._engine.finalize_object()
        self.address: int = self._engine.get_function_address("kernel")

    def run(self, numbers: Sequence[int], threads: int) -> None:
        """Have so many threads call the function together; returns when all have."""
        with RUNNING:
            self._run(self.address, (ctypes.c_int64 * len(numbers))(*numbers), threads, 0)


Call = tuple[Kernel, tuple[int, ...]]
"""A kernel and its numbers. What these point to must stay while it runs."""


@cache
def bits_of(value: float) -> int:
    """A float32 as a number of a call, of which the kernel's `float_of` makes it again."""
    bits: int
    [bits] = struct.unpack("i", struct.pack("f", value))
    return bits


def _linker(library: ctypes.CDLL) -> llvm.ExecutionEngine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name in OF_OPENMP:
        llvm.add_symbol(name, ctypes.cast(library[name], ctypes.c_void_p).value)
    llvm.add_symbol("await_others", barrier().get_function_address("await_others"))
    for name in NEVER_CALLED:
        llvm.add_symbol(name, ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value)
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def object_file(name: str, number: int) -> bytes:
    """Beside the sources, or in the user's cache directory, or compiled and left there."""
    sources = Path(__file__).parent
    file = f"{name}-{number}-{_fingerprint(sources)}.o"
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    places = [sources / "__pycache__" / file, user_cache / "diptych" / "kernels" / file]
    for place in places:
        with contextlib.suppress(OSError):
            return place.read_bytes()
    compiled = _compile(name, number)
    for place in places:
        with contextlib.suppress(OSError):
            _leave(compiled, place)
            return compiled
    log.warning("%s is compiled by every process: neither of %s can be written", name, places)
    return compiled


def _compile(name: str, number: int) -> bytes:
    log.info("compiling %s for %s", name, llvm.get_host_cpu_name())
    command = [sys.executable, "-m", "diptych_kernels.native.compile", name, str(number)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, env=environment, capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{name} does not compile: {done.stderr.decode(errors='replace')}")
    return done.stdout


def _leave(compiled: bytes, place: Path) -> None:
    """Write a file whole or not at all: other processes may look for it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=place.parent)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o644)  # an image is built by one user and used by another
        file.write(compiled)
    Path(temporary).rename(place)


def _fingerprint(sources: Path) -> str:
    """Of all that a compiled kernel depends on: the sources, the compiler, the processor."""
    digest = hashlib.sha256()
    for path in sorted(sources.glob("*.py")):
        digest.update(path.read_bytes())
    features = llvm.get_host_cpu_features().flatten()
    digest.update(f"{version('numba')} {llvm.get_host_cpu_name()} {features}".encode())
    return digest.hexdigest()[:16]
