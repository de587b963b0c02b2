"""What kernels are compiled for: a level of instructions, whichever machine compiles them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diptych_kernels.cpu_level import CpuLevel


@dataclass(frozen=True)
class Target:
    """In LLVM's words."""

    cpu: str
    features: str


WIDE: Final = "-prefer-256-bit"
"""LLVM tunes x86-64-v4 for its first processors, which slow down for vectors of 512 bits."""
VNNI: Final = f"{WIDE},+avx512vnni"
DOTS: Final = "+avx512bf16"
OF_LEVEL: Final = {
    CpuLevel.AVX2: Target("x86-64-v3", ""),
    CpuLevel.VNNI: Target("x86-64-v4", VNNI),
    CpuLevel.AMX: Target("x86-64-v4", f"{VNNI},{DOTS},+amx-tile,+amx-bf16"),
}
LOWEST_LEVEL: Final = {"bf16_": CpuLevel.VNNI, "amx_": CpuLevel.AMX}
"""By the beginnings of names; other kernels are there from AVX2 on."""


def needs_bfloat16_dots(name: str) -> bool:
    """Whether a kernel multiplies pairs of bfloat16, which not all of VNNI's processors do."""
    return name.startswith("bf16_")


def lowest_level(name: str) -> CpuLevel:
    """From which on there is such a kernel."""
    found = (level for beginning, level in LOWEST_LEVEL.items() if name.startswith(beginning))
    return next(found, CpuLevel.AVX2)


def target_of(name: str, level: CpuLevel) -> Target:
    """What a kernel is compiled for, to be used at a level that has it."""
    target = OF_LEVEL[level]
    if level is not CpuLevel.VNNI or not needs_bfloat16_dots(name):
        return target
    return Target(target.cpu, f"{target.features},{DOTS}")
