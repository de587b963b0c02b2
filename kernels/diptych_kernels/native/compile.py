"""`python -m diptych_kernels.native.compile FOLDER NAME-NUMBER ...`: compiles kernels to object
files in a folder.

It prints the name of each finished kernel. It is a process of its own, so that engines need not
import Numba, which takes half a second.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
from pathlib import Path

import llvmlite.binding as llvm
from numba import cfunc, config, types
from numba.core.cpu import CPUContext

from diptych_kernels.native.compiled.primitives import await_others, num_threads, thread_index


def compile_kernel(name: str, number: int) -> bytes:
    """Compile `entry(number)` of a module in `compiled/` to an object file, for the target that
    Numba reads from `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES`.

    The function in it is called `kernel`.
    """
    llvm.initialize_native_asmparser()  # an instruction is named as assembly does
    nowhere = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
    for function in (await_others, num_threads, thread_index):  # nothing is called here
        llvm.add_symbol(function.symbol, nowhere)
    entry = importlib.import_module(f"diptych_kernels.native.compiled.{name}").entry(number)
    compiled = cfunc(types.void(types.voidptr))(entry)
    module = llvm.parse_assembly(compiled.inspect_llvm())
    module.get_function(compiled.native_name).name = "kernel"
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=config.CPU_NAME, features=config.CPU_FEATURES, opt=3, codemodel="jitdefault", jit=True
    )
    object_file: bytes = machine.emit_object(module)
    return object_file


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    # A fifth of the time: what Python would call each function by, which nobody does, and looks
    # through all of Numba for garbage.
    CPUContext.create_cpython_wrapper = lambda *_, **__: None
    gc.set_threshold(100_000, 50, 1000)
    for name in names:
        module_name, number = name.rsplit("-", 1)
        (Path(folder) / name).write_bytes(compile_kernel(module_name, int(number)))
        print(name, flush=True)
