"""Kernels and steps: whether they are right, and how long they take."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from benchmarks.gpu.place import FEW, STEP_SIZES, Place
from benchmarks.kernels.cases import EPS, Case, Sizes, Workload
from benchmarks.kernels.measure import Timer, measured, told
from benchmarks.kernels.steps import step_cases
from torch import Tensor

from diptych_kernels.native.tile_layout import LEVEL_BITS
from diptych_kernels.paged_attention import AttentionMetadata, paged_attention
from diptych_kernels.paged_attention import reference as attention_reference
from diptych_kernels.rms_norm import reference as rms_norm_reference
from diptych_kernels.rms_norm import rms_norm
from diptych_kernels.silu_mul import reference as silu_mul_reference
from diptych_kernels.silu_mul import silu_mul

ROOT = Path(__file__).parents[2]
Pair = tuple[str, Callable[[], Tensor], Callable[[], Tensor]]


@torch.inference_mode()
def beside_float64(place: Place) -> None:
    """The largest error of each kernel, beside the largest value, in float64 on the host."""
    torch.manual_seed(0)
    workload = place.workload
    for rows in place.either((1, 33, 1000), (3,)):
        for name, ours, exact in (*pairs(workload, rows), *attentions(workload, rows)):
            try:
                got, right = ours().double().cpu(), exact()
            except RuntimeError as exc:
                place.tell(name, rows=rows, error=told(exc))
            else:
                error = ((got - right).abs().max() / right.abs().max()).item()
                place.tell(name, rows=rows, error_of_largest=error)


def exactly(tensor: Tensor) -> Tensor:
    return tensor.cpu().double()


def pairs(workload: Workload, rows: int) -> Iterator[Pair]:
    """What works on rows."""
    model = workload.model
    x, weight = workload.random(rows, model.hidden), workload.random(model.hidden)
    yield (
        "rms_norm",
        lambda: rms_norm(x, weight, EPS),
        lambda: rms_norm_reference.rms_norm(exactly(x), exactly(weight), EPS),
    )
    gate_up = workload.random(rows, 2 * model.intermediate)
    yield (
        "silu_mul",
        lambda: silu_mul(gate_up),
        lambda: silu_mul_reference.silu_mul(exactly(gate_up)),
    )


def attentions(workload: Workload, rows: int) -> Iterator[Pair]:
    """Decodes of skewed contexts with a chunk of a prompt behind them."""
    model = workload.model
    contexts = np.array([40 * rows, *range(1, 8), rows + 5])
    new = np.array([1] * 8 + [rows])
    layer, tables = workload.scattered(contexts)
    queries = workload.random(int(new.sum()), model.heads, model.head_dim)

    def metadata(device: torch.device) -> AttentionMetadata:
        return AttentionMetadata(
            query_starts=np.concatenate(([0], new.cumsum())),
            context_lens=contexts,
            block_tables=tables,
            num_decodes=8,
            block_size=model.block_size,
            device=device,
        )

    yield (
        "paged_attention",
        lambda: paged_attention(queries, layer, metadata(workload.device)),
        lambda: attention_reference.paged_attention(
            exactly(queries), exactly(layer), metadata(torch.device("cpu"))
        ),
    )


def tests_of_kernels(place: Place) -> None:
    """The tests of kernels that a GPU runs, in a few processes; a failure is a line of its own."""
    files = place.either(
        ["test_triton_*.py", "test_decode_graphs.py", "test_block_copies.py", "test_small_ops.py",
         "test_paged_attention.py", "test_poisoned_memory.py"],
        ["test_poisoned_memory.py"],
    )  # fmt: skip
    paths = [str(path) for name in files for path in (ROOT / "tests" / "kernels").glob(name)]
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line", *paths]
    workers = place.either(["-n", "6"], ["-n", "0", "-k", "nothing_is_refused"])
    started = time.perf_counter()
    run = subprocess.run(
        [*command, *workers, "-p", "no:cacheprovider"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(run.stdout, run.stderr)
    lines = run.stdout.strip().splitlines() or [run.stderr]
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            place.tell("test", error=line)
    place.tell("tests", summary=lines[-1], seconds=time.perf_counter() - started)
    if run.returncode:
        raise SystemExit(1)


def steps_of_8b(place: Place) -> None:
    """Eager and as graphs, on weights that are made on the device."""
    rows_of(place, step_cases(place.workload, place.either(STEP_SIZES, FEW)))
    if not place.dry:
        place.tell("memory", peak_gb=torch.cuda.max_memory_allocated() / 1e9)


def beside_torch(place: Place) -> None:
    """Every kernel, the products in either layout, and attention with skewed contexts."""
    sizes = place.either(Sizes(rows=(1, 64, 256, 8192)), FEW)
    rows_of(place, place.workload.cases(sizes))
    rows_of(place, small_in_graphs(place), place.graph_timer)


def small_in_graphs(place: Place) -> Iterator[Case]:
    """What a decode step replays beside its products, whose launches cost it nothing."""
    workload = place.workload
    for rows in place.either((1, 64, 256), (3,)):
        for case in chain(workload.rows(rows), workload.heads(rows)):
            yield replace(case, kernel=f"{case.kernel} in a graph")


def packed_products(place: Place) -> None:
    """Products with packed matrices beside torch's with plain ones, in a graph."""
    copies = place.either(12, 2)

    def of_one(call: Callable[[], object]) -> tuple[float, float, float]:
        median, low, high = place.graph_timer(call)
        return median / copies, low / copies, high / copies

    rows_of(place, packed_cases(place, copies), of_one)


def packed_cases(place: Place, copies: int) -> Iterator[Case]:
    for inputs, outputs in place.either(((4096, 4096), (4096, 14336)), ((160, 24),)):
        for rows in place.either((1, 8, 64, 2048), (3, 70)):
            for bits in LEVEL_BITS:
                yield place.workload.packed_product(rows, inputs, outputs, bits, copies)


@torch.inference_mode()
def rows_of(place: Place, cases: Iterator[Case], timer: Timer | None = None) -> None:
    torch.manual_seed(0)
    limits = place.limits()
    for row in measured(cases, limits["bandwidth"], limits["rate"], timer or place.timer):
        place.tell(f"{row.pop('kernel')}, {row.pop('size')}", **row)
