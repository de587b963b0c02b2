"""The tests of kernels run where there is a GPU and little else."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import torch
from waits import PATIENCE_S

ROOT = Path(__file__).parents[2]


def test_memory_is_poisoned_and_nothing_is_refused() -> None:
    """On a GPU torch's deterministic mode speaks up at every product, as here at a `put_`."""
    assert torch.empty(5).isnan().all()
    place = torch.tensor([1])
    torch.zeros(3).put_(place, torch.ones(1))
    # What a GPU says of cuBLAS, for which nobody has set CUBLAS_WORKSPACE_CONFIG.
    warnings.warn("Deterministic behavior was enabled with either ...", stacklevel=1)


def test_they_run_without_the_plugins_of_pytest() -> None:
    without = [option for name in ("asyncio", "timeout") for option in ("-p", f"no:{name}")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *without, f"{__file__}::{FIRST}"],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


FIRST = test_memory_is_poisoned_and_nothing_is_refused.__name__
