"""The target of a compiled kernel: a level of instructions, whichever machine compiles it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diptych_kernels.cpu_level import CpuLevel


@dataclass(frozen=True)
class Target:
    """A target in LLVM's terms."""

    cpu: str
    features: str


WIDE: Final = "-prefer-256-bit"
"""Permits vectors of 512 bits: LLVM avoids them for x86-64-v4, whose first processors slow down for
them."""
VNNI: Final = f"{WIDE},+avx512vnni,+fast-dpwssd"
"""LLVM replaces a product of words by two slower instructions unless it is told that it is fast."""
DOTS: Final = "+avx512bf16"
OF_LEVEL: Final = {
    CpuLevel.AVX2: Target("x86-64-v3", ""),
    CpuLevel.VNNI: Target("x86-64-v4", VNNI),
    CpuLevel.AMX: Target("x86-64-v4", f"{VNNI},{DOTS},+amx-tile,+amx-bf16"),
}
LOWEST_LEVEL: Final = {"bf16_": CpuLevel.VNNI, "byte_": CpuLevel.VNNI, "amx_": CpuLevel.AMX}
"""The lowest level of kernels, by the beginnings of their names. Others exist from AVX2 on."""


def needs_bfloat16_dots(name: str) -> bool:
    """Whether a kernel multiplies pairs of bfloat16, which not all processors of level VNNI can."""
    return name.startswith("bf16_")


def lowest_level(name: str) -> CpuLevel:
    """Return the lowest level with such a kernel."""
    found = (level for beginning, level in LOWEST_LEVEL.items() if name.startswith(beginning))
    return next(found, CpuLevel.AVX2)


def target_of(name: str, level: CpuLevel) -> Target:
    """Return the target of a kernel, for use at a level that has it."""
    target = OF_LEVEL[level]
    if level is not CpuLevel.VNNI or not needs_bfloat16_dots(name):
        return target
    return Target(target.cpu, f"{target.features},{DOTS}")
