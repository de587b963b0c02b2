"""Where a stage runs and how it tells what it has found."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.kernels.cases import Sizes, Workload
from benchmarks.kernels.costs import LLAMA_3_8B, Model
from benchmarks.kernels.measure import Row, Timer, ceilings, timed, timed_as_graph

TINY = Model(
    hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, layers=2, vocabulary=700,
    itemsize=4, block_size=16,
)  # fmt: skip
FEW = Sizes(
    rows=(3,), decodes=((2, 18),), skews=((2, 18, 3),), prefills=((5, 6),), blocks=2, sampled=(2,),
    decode_steps=((3, 9),), prefill_steps=(7,), mixed_steps=((2, 9, 4),),
)  # fmt: skip
STEP_SIZES = Sizes(
    decode_steps=(*((rows, 1024) for rows in (1, 32, 64, 65, 128, 256)), (64, 4096)),
    prefill_steps=(2048, 8192),
    mixed_steps=((32, 2048, 1024),),
)


@dataclass(frozen=True)
class Place:
    """A GPU, or the simulated device for a rehearsal, on which everything is small."""

    lines: Path
    stage: int
    dry: bool
    device: torch.device

    def tell(self, what: str, **found: Any) -> None:
        """Append a line: whatever happens afterwards, it is there."""
        line = {"stage": self.stage, "what": what, **found}
        with self.lines.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def either(self, real: Any, small: Any) -> Any:
        """A size for the GPU, and one for a rehearsal."""
        return small if self.dry else real

    @property
    def timer(self) -> Timer:
        return by_the_clock if self.dry else timed

    @property
    def graph_timer(self) -> Timer:
        return by_the_clock if self.dry else timed_as_graph

    @property
    def workload(self) -> Workload:
        if self.dry:
            return Workload(TINY, self.device, torch.float32)
        return Workload(LLAMA_3_8B, self.device, torch.bfloat16)

    def limits(self) -> Row:
        """See `ceilings`."""
        copy_gib, product = self.either((2, 8192), (1e-6, 8))
        return ceilings(self.device, copy_gib, product, self.timer)

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if not self.dry:
            torch.cuda.synchronize()


def by_the_clock(call: Callable[[], object]) -> tuple[float, float, float]:
    """As `timed`, of one call; for a rehearsal, whose times mean nothing."""
    started = time.perf_counter()
    call()
    seconds = time.perf_counter() - started
    return seconds, seconds, seconds


def place_of(lines: Path, stage: int, *, dry: bool) -> Place:
    """Raises `SystemExit` where there is no GPU and none is simulated."""
    if dry:
        import pytest
        from engine_kit import foreign_device

        foreign_device.install(pytest.MonkeyPatch())
        return Place(lines, stage, dry, foreign_device.DEVICE)
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here; DRY=1 rehearses on a simulated device")
    return Place(lines, stage, dry, torch.device("cuda", 0))
