"""A tiny model that sees, and what transformers makes of the same prompts."""

from __future__ import annotations

import pytest
from model_kit.seeing import Published


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("seeing"))
