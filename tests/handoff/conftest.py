"""Every hand-off is tried both ways: blocks that travel from and to where they are, and blocks that
are copied through host memory, as a GPU's are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_kit import handoff as handoff_kit

from diptych_protocol.config import Staging


@pytest.fixture(scope="module", autouse=True, params=["auto", "always"], ids=["direct", "staged"])
def _staging(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sets the way of all engines of a module, unless a test says otherwise."""
    way: Staging = request.param
    with handoff_kit.staging(way):
        yield
