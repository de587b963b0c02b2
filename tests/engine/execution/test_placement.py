"""Which GPU a rank takes."""

from __future__ import annotations

import pytest

from diptych_engine.execution.placement import gpu_of
from diptych_protocol import EngineConfig


@pytest.mark.parametrize(
    ("ranks", "replicas", "visible", "expected"),
    [
        pytest.param(1, 4, 4, [0, 1, 2, 3], id="replicas on one machine"),
        pytest.param(2, 2, 4, [0, 1, 2, 3], id="replicas of two ranks"),
        pytest.param(1, 3, 1, [0, 0, 0], id="each replica sees its own only"),
        pytest.param(2, 2, 2, [0, 1, 0, 1], id="each replica sees its own two"),
    ],
)
def test_no_two_ranks_that_see_the_same_gpus_take_the_same_one(
    ranks: int, replicas: int, visible: int, expected: list[int]
) -> None:
    taken = [
        gpu_of(
            EngineConfig(
                model="m",
                tensor_parallel_size=ranks,
                data_parallel_size=replicas,
                data_parallel_rank=replica,
            ),
            rank,
            visible,
        )
        for replica in range(replicas)
        for rank in range(ranks)
    ]
    assert taken == expected
