"""`python -m diptych_kernels [--levels all]`: compiles every kernel and stores it beside its
source.

Images and other read-only installations need this: there, an engine would otherwise compile its
kernels, for some seconds, at each start. Tests need it, because their first engines would all
compile at once. Without `--levels all` it compiles for the levels that this machine has.
"""

from __future__ import annotations

import argparse
import os
import platform
from concurrent.futures import ThreadPoolExecutor

from diptych_kernels.cpu_kernels import KERNELS
from diptych_kernels.cpu_level import CpuLevel, is_x86_64, machine_level
from diptych_kernels.native.object_files import lowest_level, needs_bfloat16_dots, object_files


def compile_all(highest: CpuLevel) -> None:
    """Compile for every level up to this one, with as many compilers at a time as there are
    processors."""
    processes = os.cpu_count() or 1
    work: list[tuple[list[str], CpuLevel]] = []
    for level in CpuLevel:
        if CpuLevel.NONE < level <= highest:
            there = [(name, number) for name, number in KERNELS if lowest_level(name) <= level]
            # A compiler has one target.
            for needs in (False, True):
                own = [f"{n}-{i}" for n, i in there if needs_bfloat16_dots(n) is needs]
                work += [(own[first::processes], level) for first in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(object_files, *zip(*work, strict=True)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m diptych_kernels")
    parser.add_argument(
        "--levels",
        choices=("own", "all"),
        default="own",
        help="own: those that this machine has; all: for machines of every level",
    )
    everything = parser.parse_args().levels == "all" and is_x86_64(platform.machine())
    compile_all(CpuLevel.AMX if everything else machine_level())
