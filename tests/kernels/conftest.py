"""Where kernels run: on a GPU if there is one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that what a kernel forgets to write is seen.

    torch does so in its deterministic mode only. Nothing else is wanted of that mode, so it refuses
    nothing: on a GPU it would refuse every product of matrices, and sums along an axis.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*determinis")
        yield
    torch.use_deterministic_algorithms(False)
