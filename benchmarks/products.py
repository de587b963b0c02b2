"""Which part of the processor's peak the products with packed weights reach, by rows.

`python -m benchmarks.products [--levels avx2 vnni vnni/q8 amx] [--repetitions 15]`. The peak is
that of the products' own instruction, repeated with all operands in registers. It and the product
take turns, on one thread, so that both meet the same clock and the same neighbours: the part is the
median of those of each turn, in the processor's seconds. Nothing but the product is measured: no
attention, no norms. The matrix unit computes prompts only; q8 stands for inputs of 8 bits.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import llvmlite.binding as llvm
import torch
from benchmarks.machine import machine
from llvmlite import ir
from torch import Tensor

from diptych_kernels.cpu_level import CpuLevel, forced, machine_level
from diptych_kernels.native.object_files import OF_LEVEL, Target
from diptych_kernels.native.tile_layout import BYTE, LEVEL_BITS, SPANS, WORD_BITS
from diptych_kernels.packed_product import cpu, to_tiles

ROWS: Final = (1, 4, 16, 64, 128, 512)
SHAPE: Final = (2304, 2048)
"""Rows and columns of the matrix: levels of 4 bits take 3 MB."""
LEAST_SECONDS: Final = 0.01
"""A turn takes so long at least: the clock of a thread's time is coarse."""
CHAINS: Final = 10
"""Sums that do not wait for each other."""
ROUNDS: Final = 2_000_000
ALL_TILES: Final = bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8])
"""A configuration of the matrix unit: eight tiles of 16 rows of 64 bytes."""


class Instruction(NamedTuple):
    """What multiplies, and how often at once."""

    target: Target
    lines: tuple[str, ...]
    products: int
    """What all lines together multiply, in pairs of numbers."""
    in_tiles: bool = False
    """Whether it needs a configuration of the matrix unit."""


OF_PRODUCTS: Final = {
    "avx2": Instruction(
        OF_LEVEL[CpuLevel.AVX2],
        (
            "vpmaddwd %ymm14, %ymm15, %ymm{temporary}",
            "vpaddd %ymm{temporary}, %ymm{sum}, %ymm{sum}",
        ),
        16,
    ),
    "vnni": Instruction(OF_LEVEL[CpuLevel.VNNI], ("vpdpwssd %zmm14, %zmm15, %zmm{sum}",), 32),
    "vnni/q8": Instruction(OF_LEVEL[CpuLevel.VNNI], ("vpdpbusd %zmm14, %zmm15, %zmm{sum}",), 64),
    "amx": Instruction(
        OF_LEVEL[CpuLevel.AMX], ("tdpbf16ps %tmm6, %tmm5, %tmm{tile}",), 16**2 * 32, True
    ),
}


def level_of(name: str) -> CpuLevel:
    return CpuLevel[name.partition("/")[0].upper()]


def peak(instruction: Instruction) -> Callable[[], float]:
    """Return what measures products a second at their best."""
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 2)
    own = ir.Function(module, kind, "peak")
    builder = ir.IRBuilder(own.append_basic_block())
    if instruction.in_tiles:
        configures = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.asm(configures, "ldtilecfg ($0)", "r", [own.args[1]], True)
    before, loop, end = builder.block, own.append_basic_block(), own.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(ir.IntType(64))
    lines = [
        line.format(sum=chain, temporary=CHAINS + chain % 4, tile=chain % 4)
        for chain in range(CHAINS)
        for line in instruction.lines
    ]
    clobbered = ",".join(f"~{{xmm{number}}}" for number in range(16))
    builder.asm(ir.FunctionType(ir.VoidType(), []), "\n".join(lines), clobbered, [], True)
    following = builder.add(index, ir.IntType(64)(1))
    index.add_incoming(ir.IntType(64)(0), before)
    index.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, own.args[0]), loop, end)
    builder.position_at_end(end)
    if instruction.in_tiles:
        builder.asm(ir.FunctionType(ir.VoidType(), []), "tilerelease", "", [], True)
    builder.ret_void()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    host = llvm.Target.from_default_triple().create_target_machine(
        cpu=instruction.target.cpu, features=instruction.target.features, jit=True
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), host)
    engine.finalize_object()
    run = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_char_p)(
        engine.get_function_address("peak")
    )
    rounds = ROUNDS // 20 if instruction.in_tiles else ROUNDS

    def measured(_code: Any = engine) -> float:
        products = rounds * CHAINS * instruction.products
        return products / seconds(lambda: run(rounds, ALL_TILES))

    return measured


def seconds(work: Callable[[], None]) -> float:
    """The processor's seconds."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def random_tiles(bits: int) -> Tensor:
    rows, columns = SHAPE
    levels = torch.randint(0, 1 << bits, SHAPE, dtype=torch.uint8)
    scale, offset = torch.randn(2, rows, columns // SPANS[bits])
    tiles = to_tiles(levels, scale, offset, bits)
    if tiles is None:
        raise ValueError(f"no tiles for {SHAPE}")
    return tiles


def product(tiles: Tensor, rows: int, name: str) -> Callable[[], float]:
    """Return what measures products a second of `rows` decodes, or of rows of a prompt by the
    matrix unit."""
    x, out = torch.randn(rows, SHAPE[1]), torch.empty(rows, SHAPE[0])

    workspace = torch.empty(cpu.workspace_bytes(*x.shape), dtype=torch.int8)
    kernel, arguments = (
        cpu.chunk_call(x, 0, tiles, out, workspace, add=False)
        if name == "amx"
        else cpu.decode_call(
            x, tiles, out, workspace, add=False, input_bits=BYTE if "/" in name else WORD_BITS
        )
    )

    def work(_memory: Any = (x, out, workspace)) -> None:
        kernel.run(arguments, 1)

    return rate_of(work, rows * SHAPE[0] * SHAPE[1])


def rate_of(work: Callable[[], None], products: int) -> Callable[[], float]:
    """Return what measures products a second of work that computes so many."""
    work()
    count = 1 + int(LEAST_SECONDS / max(seconds(work), 1e-6))

    def repeated() -> None:
        for _ in range(count):
            work()

    return lambda: count * products / seconds(repeated)


def cells_of(
    cases: Iterable[Callable[[], float]], best: Callable[[], float], repetitions: int
) -> str:
    """Measure each case and the peak in turn. Return the end of a table's row: medians of the
    cases' parts of the peak, and the peak in G/s."""
    cells, peaks = [], []
    for own in cases:
        pairs = [(own(), best()) for _ in range(repetitions)]
        cells.append(f"{statistics.median(a / b for a, b in pairs):.2f}")
        peaks += [b for _, b in pairs]
    return f"{' | '.join(cells)} | {statistics.median(peaks) / 1e9:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    levels = [name for name in OF_PRODUCTS if level_of(name) <= machine_level()]
    parser.add_argument("--levels", nargs="*", choices=levels, default=levels)
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--bits", nargs="*", type=int, choices=LEVEL_BITS, default=LEVEL_BITS)
    parser.add_argument("--repetitions", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    print(f"| level | bits | {' | '.join(f'{rows} rows' for rows in args.rows)} | peak, G/s |")
    print("|---" * (len(args.rows) + 3) + "|")
    for name in args.levels:
        with forced(level_of(name)):
            best = peak(OF_PRODUCTS[name])
            for bits in args.bits:
                tiles = random_tiles(bits)
                cases = (product(tiles, rows, name) for rows in args.rows)
                print(f"| {name} | {bits} | {cells_of(cases, best, args.repetitions)}", flush=True)


if __name__ == "__main__":
    main()
