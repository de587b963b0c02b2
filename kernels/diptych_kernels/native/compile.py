"""`python -m diptych_kernels.native.compile MODULE NUMBER`: a kernel as an object file, on stdout.

A process of its own, so that no engine needs to import Numba: that and what Numba does before it
loads anything it compiled earlier take half a second.
"""

from __future__ import annotations

import importlib
import re
import sys

import llvmlite.binding as llvm
from numba import cfunc, types


def compile_kernel(module: str, number: int) -> bytes:
    """`entry(number)` of a module as the function `kernel` of an object file for this processor."""
    entry = importlib.import_module(module).entry(number)
    signature = types.void(types.CPointer(types.int64))
    compiled = cfunc(signature)(entry)
    own_name = re.escape(compiled._wrapper_name)
    text = re.sub(rf'@"?{own_name}"?(?=\()', "@kernel", compiled.inspect_llvm())
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )
    object_file: bytes = machine.emit_object(llvm.parse_assembly(text))
    return object_file


if __name__ == "__main__":
    sys.stdout.buffer.write(compile_kernel(sys.argv[1], int(sys.argv[2])))
