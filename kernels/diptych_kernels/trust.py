"""Tries each kernel once in each process, before its first use, and disables those that fail.

Compilers, processors and hypervisors have faults, and object files may come from elsewhere. One
small case shows an error that is larger than rounding. Torch's reference replaces a kernel that
fails its case.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych_kernels.cpu_level import (
    CpuLevel,
    cpu_level,
    forgotten,
    machine_has_bfloat16_dots,
    remembered,
)
from diptych_kernels.native.kernel import Kernel, kernel_of, load, openmp
from diptych_kernels.native.object_files import lowest_level, needs_bfloat16_dots

log = logging.getLogger(__name__)

Results = tuple[Tensor, Tensor]
"""The kernel's results, and the reference's."""

_set_aside: dict[str, str] = {}
forgotten(_set_aside.clear)


@dataclass(frozen=True, eq=False)
class KnownCase:
    """A small test case of a kernel, whose result is known.

    It is declared beside the kernel's reference. Its numbers are the same in every process. Its
    sizes are multiples of nothing, where a kernel allows that, so that remainders are computed too.
    It takes some milliseconds.
    """

    name: str
    """The kernel's name."""
    results: Callable[[Kernel], Results]
    tolerance: float
    """The largest norm of the difference, as a share of the reference's norm."""

    @torch.inference_mode()
    def distance(self, kernel: Kernel) -> float:
        """Return the kernel's distance from the reference, as a share of the reference's norm."""
        threads = torch.get_num_threads()
        # On a busy machine, several threads would wait for each other longer than one computes.
        torch.set_num_threads(1)
        try:
            actual, expected = self.results(kernel)
            return float((actual - expected).norm() / expected.norm())
        finally:
            torch.set_num_threads(threads)


def random_values(*shape: int) -> Tensor:
    """Return inputs of a case: float32, always the same for a number of dimensions."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def unwritten(*shape: int) -> Tensor:
    """Return memory for the results of a case, full of NaN, which shows what a kernel does not
    write."""
    return torch.full(shape, torch.nan)


def set_aside() -> Mapping[str, str]:
    """Return the disabled kernels of the level in use, with the reason for each."""
    return dict(_set_aside)


def is_there(name: str) -> bool:
    """Whether the level in use has such a kernel, and there are threads to run it."""
    level = cpu_level()
    if level < lowest_level(name) or openmp() is None:
        return False
    # All processors with a matrix unit have them.
    return level > CpuLevel.VNNI or not needs_bfloat16_dots(name) or machine_has_bfloat16_dots()


@remembered
def is_trusted(case: KnownCase, number: int) -> bool:
    """Whether a case's kernel exists and gives the known result.

    The first call loads the kernel, compiles it if necessary, and tries it. A kernel that fails is
    disabled, with a warning.
    """
    if not is_there(case.name):
        return False
    kernel = kernel_of(case.name, number)
    fault = _fault_of(kernel, case)
    if fault:
        _set_aside[kernel.file] = fault
        log.warning(
            "the kernel %s for %s is put aside, torch computes in its place: %s",
            kernel.file, kernel.level.word, fault,
        )  # fmt: skip
    return not fault


def _fault_of(kernel: Kernel, case: KnownCase) -> str:
    """What is wrong with a kernel; empty if nothing is."""
    try:
        load([kernel])
    except (RuntimeError, OSError, subprocess.SubprocessError) as exc:
        return str(exc) or repr(exc)
    distance = case.distance(kernel)
    if distance <= case.tolerance:
        return ""
    return f"of a known result it differs by {distance:.2g} of its norm, {case.tolerance:g} may be"
