"""Which part of the processor's peak the attention of prompts reaches, by context.

`python -m benchmarks.prompt_attention [--kinds avx2 amx] [--repetitions 15]` computes the last 512
tokens of contexts, with the heads of SmolLM2-135M, on one thread. The peak is that of the kernel's
own instruction, with all operands in registers; it and the kernel take turns, as in
`benchmarks.products`. Products count as many as queries see keys: powers, sums, and what is
computed of keys that no query sees are the distance to 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from benchmarks.machine import machine
from benchmarks.products import OF_PRODUCTS, Instruction, cells_of, peak, rate_of

from diptych_kernels.cpu_level import CpuLevel, forced, machine_has_bfloat16_dots, machine_level
from diptych_kernels.native.object_files import OF_LEVEL, target_of
from diptych_kernels.paged_attention import AttentionMetadata, cpu

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
TOKENS: Final = 512
CONTEXTS: Final = (512, 1024, 2048, 4096, 8192)


class Kind(NamedTuple):
    """A kernel, by what chooses it."""

    level: CpuLevel
    kv_dtype: torch.dtype
    instruction: Instruction


def _of_floats(level: CpuLevel, register: str, lanes: int) -> Instruction:
    line = f"vfmadd231ps %{register}14, %{register}15, %{register}{{sum}}"
    return Instruction(OF_LEVEL[level], (line,), lanes)


KINDS: Final = {
    "avx2": Kind(CpuLevel.AVX2, torch.float32, _of_floats(CpuLevel.AVX2, "ymm", 8)),
    "vnni": Kind(CpuLevel.VNNI, torch.float32, _of_floats(CpuLevel.VNNI, "zmm", 16)),
    "bf16": Kind(
        CpuLevel.VNNI,
        torch.bfloat16,
        Instruction(
            target_of("bf16_prefill_attention", CpuLevel.VNNI),
            ("vdpbf16ps %zmm14, %zmm15, %zmm{sum}",),
            32,
        ),
    ),
    "amx": Kind(
        CpuLevel.AMX,
        torch.bfloat16,
        OF_PRODUCTS["amx"],
    ),
}


def attention(kind: Kind, context: int) -> Callable[[], float]:
    """Return what measures products a second of a chunk at the end of a context."""
    blocks = context // BLOCK_SIZE
    queries = torch.randn(TOKENS, HEADS, HEAD_DIM)
    cache = torch.randn(blocks, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM).to(kind.kv_dtype)
    table = np.random.default_rng(0).permutation(blocks)[None].astype(np.int64)
    metadata = AttentionMetadata(np.array([0, TOKENS]), np.array([context]), table, 0, BLOCK_SIZE)
    attended = torch.empty(queries.shape)
    [(kernel, arguments)] = cpu.calls(queries, cache, metadata, attended, may_round=True)
    seen = TOKENS * (context - TOKENS) + TOKENS * (TOKENS + 1) // 2

    def work(_memory: Any = (queries, cache, metadata, attended)) -> None:
        kernel.run(arguments, 1)

    return rate_of(work, seen * HEADS * 2 * HEAD_DIM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = [
        name
        for name, kind in KINDS.items()
        if kind.level <= machine_level() and (name != "bf16" or machine_has_bfloat16_dots())
    ]
    parser.add_argument("--kinds", nargs="*", choices=kinds, default=kinds)
    parser.add_argument("--contexts", nargs="*", type=int, default=CONTEXTS)
    parser.add_argument("--repetitions", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    print(f"| kind | {' | '.join(map(str, args.contexts))} | peak, G/s |")
    print("|---" * (len(args.contexts) + 2) + "|")
    for name in args.kinds:
        with forced(KINDS[name].level):
            best = peak(KINDS[name].instruction)
            cases = (attention(KINDS[name], context) for context in args.contexts)
            print(f"| {name} | {cells_of(cases, best, args.repetitions)}", flush=True)


if __name__ == "__main__":
    main()
