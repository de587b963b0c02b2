"""Engines' connectors without vLLM, closed when their test ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_engine import Engine


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Those that a test has started."""
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.close()
