"""What the halves say that they have counted, for vLLM to add up."""

from __future__ import annotations

from diptych_protocol import KVTransferStats
from diptych_vllm.figures import FIGURES, OF_HINGE, Growth, add, totals_of


def test_the_sum_of_what_is_told_is_the_total_and_nothing_is_told_twice() -> None:
    growth, told = Growth(), dict[str, int]()
    for total in (0, 3, 3, 10):
        add(told, growth.of({"a": total, "b": 1}))
        assert told == {"b": 1} | ({"a": total} if total else {})
    assert growth.of({"a": 10, "b": 1}) == {}


def test_every_figure_of_the_hinge_is_one_of_its_totals() -> None:
    stats = KVTransferStats(blocks_received=5, leases_held=2)
    totals = totals_of(stats)
    assert set(totals) == set(OF_HINGE) < set(FIGURES)
    assert Growth().of(totals) == {"blocks_received": 5}
