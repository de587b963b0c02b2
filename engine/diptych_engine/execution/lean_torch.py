"""Lets a process of ours start without a third of torch, and without collections of garbage.

Torch describes its operators once more in Python, for tensors without data and for `torch.compile`.
These descriptions take as much of a start as all modules of ours. Only others' code needs them,
such as a worker extension: they are imported before that is, or when torch compiles. So is what
exports or quantises models, and what draws from distributions.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, Final

DESCRIPTIONS: Final = "torch._meta_registrations"
"""The last module that `import torch` imports. What it imports ends in a circle if anything else
imports it first."""
LATER: Final = (
    "torch.distributions", "torch.nn.intrinsic", "torch.nn.qat", "torch.nn.quantizable",
    "torch.nn.quantized", "torch.quantization", "torch.export", DESCRIPTIONS,
)  # fmt: skip
"""In torch's order."""
LIBRARY: Final = "lib/libtorch_cpu.so"
WITH_CUDA: Final = "lib/libtorch_cuda.so"
LINKED_BEFORE: Final = ("llguidance", "mmap", "numpy", "queue", "resource", "tokenizers")
"""Whatever else a core imports before torch that has a library: the linker serves one at a time."""
COMPILERS: Final = ("torch._dynamo", "torch._inductor")


class _Later(MetaPathFinder, Loader):
    """Finds almost empty modules in the places of `LATER`, until somebody needs one."""

    linking: Thread | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in COMPILERS:
            whole_torch()
        elif fullname == "torch" and self.linking is not None:
            self.linking.join()
        return spec_from_loader(fullname, self) if fullname in LATER else None

    def exec_module(self, module: ModuleType) -> None:
        """Do the one thing of theirs that every process needs: else there is no `Generator`. Older
        releases of torch do not do it."""
        import torch  # it is just being imported

        module.__getattr__ = partial(_of_the_whole, module.__name__)  # type: ignore[method-assign]
        if hasattr(torch._C, "_set_generator_metaclass"):
            base = importlib.import_module("torch._opaque_base")
            torch._C._set_generator_metaclass(base.OpaqueBaseMeta)


def _of_the_whole(module: str, name: str) -> Any:
    """Return what others' code asks an almost empty module for."""
    if name.startswith("__") and name != "__path__":  # `inspect` looks through all modules
        raise AttributeError(name)
    whole_torch()
    return getattr(importlib.import_module(module), name)


def start_lean() -> None:
    """To be called before anything imports torch. Collect garbage again after the start."""
    gc.disable()
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Later())


def link_torch() -> None:
    """After `start_lean`: begin to link torch's largest library in a thread, which needs 0.2 s and
    no interpreter. The first import of torch ends the thread, so do other imports before."""
    finder = next((each for each in sys.meta_path if isinstance(each, _Later)), None)
    if finder is None or finder.linking is not None or "torch" in sys.modules:
        return
    found = find_spec("torch")
    for folder in map(Path, (found and found.submodule_search_locations) or ()):
        # Torch for a GPU has an order of libraries of its own.
        if (folder / LIBRARY).exists() and not (folder / WITH_CUDA).exists():
            for name in LINKED_BEFORE:
                importlib.import_module(name)
            arguments = os.fsencode(folder / LIBRARY), os.RTLD_LAZY
            finder.linking = Thread(target=ctypes.CDLL(None).dlopen, args=arguments)
            finder.linking.start()


def whole_torch() -> None:
    """Import what `start_lean` has left out. Safe to call at any time."""
    for finder in [each for each in sys.meta_path if isinstance(each, _Later)]:
        sys.meta_path.remove(finder)
        for name in LATER:
            sys.modules.pop(name, None)
        for name in LATER:
            importlib.import_module(name)
