"""Each grant and each fetch ends in one report, whatever the hinge says and how often."""

from __future__ import annotations

import pytest

from diptych_kv_transfer.tables.actions import LeaseEnded, LoadEnded
from diptych_vllm.transfers import Fetched, Results, Transfers

ENDED = LeaseEnded("p", [1], "released", "lease")


def test_a_granted_lease_is_reported_once() -> None:
    table = Transfers()
    table.promised("lease")
    table.granted("lease", "r")
    assert table.take_results() == Results()
    table.lease_ended(ENDED)
    table.lease_ended(ENDED)
    assert table.take_results() == Results(sent={"r"})
    assert table.take_results() == Results()


def test_a_lease_that_ended_before_its_grant_frees_the_blocks_at_the_grant() -> None:
    table = Transfers()
    table.promised("lease")
    table.lease_ended(ENDED)
    assert table.take_results() == Results()
    table.granted("lease", "r")
    table.lease_ended(ENDED)
    assert table.take_results() == Results(sent={"r"})


def test_a_withdrawn_lease_is_not_reported() -> None:
    table = Transfers()
    table.promised("lease")
    table.withdrawn("lease")
    table.lease_ended(ENDED)
    table.promised("lease")
    table.lease_ended(ENDED)
    table.withdrawn("lease")
    assert table.take_results() == Results()


def test_a_load_is_reported_once_and_only_a_good_one_as_good() -> None:
    table = Transfers()
    table.fetching("r/1", "r", ["r/1@0"])
    table.fetching("s/2", "s", ["s/2@0"])
    table.refused("t")
    assert table.load_ended(LoadEnded("r/1@0", True)) == Fetched("r", [])
    assert table.load_ended(LoadEnded("r/1@0", False)) is None
    assert table.load_ended(LoadEnded("s/2@0", False, "lost")) == Fetched("s", [], ok=False)
    assert table.load_ended(LoadEnded("other", False)) is None
    assert table.take_results() == Results(set(), {"r", "s", "t"}, {"s", "t"})


@pytest.mark.parametrize("failed", [set(), {0}, {1}, {0, 1}])
def test_a_fetch_from_several_ranks_is_reported_when_all_have_ended_and_good_if_all_were(
    failed: set[int],
) -> None:
    table = Transfers()
    table.fetching("r/1", "r", ["r/1@0", "r/1@1"])
    assert table.cancelled("r/1") == ["r/1@0", "r/1@1"]
    ended = table.load_ended(LoadEnded("r/1@0", 0 not in failed))
    assert ended is not None
    assert ended.loads == table.cancelled("r/1") == ["r/1@1"]
    assert table.take_results() == Results()
    table.load_ended(LoadEnded("r/1@1", 1 not in failed))
    assert table.take_results() == Results(set(), {"r"}, {"r"} if failed else set())
    assert table.cancelled("r/1") == []


def test_what_is_held_is_cancelled_by_its_names_once() -> None:
    table = Transfers()
    table.holding("r/1", ["r/1@2", "r/1@3"])
    assert table.cancelled("r/1") == ["r/1@2", "r/1@3"]
    assert table.cancelled("r/1") == []
