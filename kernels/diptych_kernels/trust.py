"""A kernel is believed only after it has been tried: once in each process, before its first use.

Compilers, processors and hypervisors have faults, and object files may come from elsewhere. What
is wrong by more than rounding shows in one small case; torch's reference takes its place then.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Mapping

from diptych_kernels.cpu_level import (
    CpuLevel,
    cpu_level,
    forgotten,
    machine_has_bfloat16_dots,
    remembered,
)
from diptych_kernels.native.kernel import Kernel, kernel_of, load, openmp
from diptych_kernels.native.targets import lowest_level, needs_bfloat16_dots

log = logging.getLogger(__name__)

_set_aside: dict[str, str] = {}
forgotten(_set_aside.clear)


def set_aside() -> Mapping[str, str]:
    """Kernels of the level in use that are not used, and why."""
    return dict(_set_aside)


def is_there(name: str) -> bool:
    """Whether the level in use has such a kernel, and there are threads that it can run on."""
    level = cpu_level()
    if level < lowest_level(name) or openmp() is None:
        return False
    # All processors with a matrix unit have them.
    return level > CpuLevel.VNNI or not needs_bfloat16_dots(name) or machine_has_bfloat16_dots()


@remembered
def is_trusted(name: str, number: int) -> bool:
    """Whether a kernel is there, and gives the known answer to its known case.

    It is loaded, or even compiled, and tried when this is first asked; if it does not do what it
    should it is put aside, with a warning.
    """
    if not is_there(name):
        return False
    kernel = kernel_of(name, number)
    fault = _fault_of(kernel)
    if fault:
        _set_aside[kernel.file] = fault
        log.warning(
            "the kernel %s for %s is put aside, torch computes in its place: %s",
            kernel.file, kernel.level.word, fault,
        )  # fmt: skip
    return not fault


def _fault_of(kernel: Kernel) -> str:
    """What is wrong with a kernel; empty if nothing is."""
    from diptych_kernels.self_check import CASES

    try:
        load([kernel])
    except (RuntimeError, OSError, subprocess.SubprocessError) as exc:
        return str(exc) or repr(exc)
    case = CASES[kernel.name]
    distance = case.distance(kernel)
    if distance <= case.tolerance:
        return ""
    return f"of a known result it differs by {distance:.2g} of its norm, {case.tolerance:g} may be"
