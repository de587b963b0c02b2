"""Hand-offs between engines that keep their KV in different ways: token for token the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checkpoint_kit import random_tensors, save_model
from geometry_kit import Engines, Geometry


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Of a model whose every answer depends on all of its context."""
    model = save_model(tmp_path_factory.mktemp("model"), random_tensors(5))
    engines = Engines(model)
    yield engines
    engines.close()


def prompt_of(length: int, seed: int) -> list[int]:
    return [(seed * 31 + index * index * 7 + index) % 64 for index in range(length)]


@pytest.mark.parametrize(
    ("giver", "taker"),
    [
        ((16, 1), (16, 1)),
        ((16, 2), (16, 2)),
        ((16, 1), (32, 1)),
        ((32, 1), (16, 1)),
        ((16, 2), (16, 1)),
        ((16, 1), (16, 2)),
        ((16, 2), (32, 1)),
    ],
)
@pytest.mark.parametrize("length", [1, 16, 77])
def test_what_is_handed_over_is_what_was_computed(
    engines: Engines, giver: Geometry, taker: Geometry, length: int
) -> None:
    prompt = prompt_of(length, seed=hash((giver, taker)) % 100)
    expected = engines.alone(engines.of("alone", (16, 1)), prompt)
    said = engines.pass_on(engines.of("giver", giver), engines.of("taker", taker), prompt)
    assert said == expected
