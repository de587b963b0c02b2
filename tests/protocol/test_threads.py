"""The model's share of the processors."""

from __future__ import annotations

import pytest

from diptych_protocol.threads import model_threads


@pytest.mark.parametrize(
    ("processors", "threads"),
    [(0.2, 1), (1, 1), (1.9, 1), (2, 2), (2.9, 2), (3, 2), (4, 3), (4.5, 3), (64, 63)],
)
def test_from_three_processors_on_one_is_spare(processors: float, threads: int) -> None:
    assert model_threads(processors) == threads


@pytest.mark.parametrize(
    ("processors", "engines", "threads"), [(2, 2, 1), (1, 4, 1), (9, 2, 4), (64, 4, 15)]
)
def test_engines_share_what_is_there(processors: float, engines: int, threads: int) -> None:
    assert model_threads(processors, engines) == threads
