"""Each grant and each fetch ends in one report, whatever the hinge says and how often."""

from __future__ import annotations

from diptych_kv_transfer.tables.actions import LeaseEnded, LoadEnded
from diptych_vllm.transfers import Results, Transfers

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
    table.fetching("r/1", "r")
    table.fetching("s/2", "s")
    table.refused("t")
    assert table.load_ended(LoadEnded("r/1", True)) == "r"
    assert table.load_ended(LoadEnded("r/1", False)) is None
    assert table.load_ended(LoadEnded("s/2", False, "lost")) == "s"
    assert table.load_ended(LoadEnded("other", False)) is None
    assert table.take_results() == Results(set(), {"r", "s", "t"}, {"s", "t"})
