"""Where kernels run: on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


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
