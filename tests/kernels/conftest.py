"""Triton kernels run on a GPU where there is one, and else in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Triton looks when it is imported, which no test room but this one does.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that what a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
