"""What a router takes an engine's queue to be, between the engine's reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_pools import Fleet, idle, request

from diptych_protocol.engine_stats import KVTransferStats, SchedulerStats
from diptych_router.engines.engine_table import UNHEARD_S, EngineRow, EngineTable

TOKEN_S = 1e-3


def row_of(table: EngineTable | None = None) -> EngineRow:
    table = EngineTable() if table is None else table
    row = table.add("engine", 0)
    row["prompt_token_s"], row["told_steps"] = TOKEN_S, 1.0
    row.report(queue(0), 0, 0.0)
    return row


def queue(tokens: int, running: int = 0) -> SchedulerStats:
    return SchedulerStats(queued_prompt_tokens=tokens, num_running=running, blocks_total=1)


def wait_s(row: EngineRow, now: float) -> float:
    return max(0.0, row["free_at"] - now)


def test_what_was_given_counts_at_once_and_is_worked_off() -> None:
    row = row_of()
    row.place(2000, now=1.0)
    assert wait_s(row, 1.0) == pytest.approx(2.0)
    assert wait_s(row, 2.5) == pytest.approx(0.5)
    assert wait_s(row, 9.0) == 0
    row.place(1000, now=9.0)
    assert wait_s(row, 9.0) == pytest.approx(1.0)


def test_a_report_that_was_made_before_a_request_came_does_not_hide_it() -> None:
    row = row_of()
    row.place(2000, now=1.0)
    row.sent(1.0)
    row.report(queue(500), num_received=0, now=1.1)
    assert wait_s(row, 1.1) == pytest.approx(2.5)
    assert row["coming"] == 1
    row.report(queue(2300, running=1), num_received=1, now=1.2)
    assert wait_s(row, 1.2) == pytest.approx(2.3)
    assert (row["rows"], row["coming"]) == (1, 0)


def test_one_that_is_planned_to_decode_here_counts_until_a_report_has_it() -> None:
    row = row_of()
    row.charge(0, planned=1)
    assert row["coming"] == 1
    row.charge(0, planned=-1)
    row.sent(1.0)
    assert row["coming"] == 1
    row.report(queue(0, running=1), num_received=1, now=2.0)
    assert (row["rows"], row["coming"]) == (1, 0)


def test_one_that_the_engine_never_counts_is_forgotten() -> None:
    """As after a message that was lost."""
    row = row_of()
    row.place(2000, now=1.0)
    row.sent(1.0)
    row.report(queue(0), num_received=0, now=1.1 + UNHEARD_S)
    assert wait_s(row, 1.1 + UNHEARD_S) == 0
    assert row["coming"] == 0


def test_another_process_at_the_address_has_nothing_of_it() -> None:
    row = row_of()
    row.place(2000, now=1.0)
    row.sent(1.0)
    row.restarted()
    row.report(queue(0), num_received=0, now=1.1)
    assert wait_s(row, 1.1) == 0


def test_engines_that_have_told_nothing_have_the_rates_of_the_others() -> None:
    table = EngineTable()
    told, silent = table.add("told", 0), table.add("silent", 1)
    for count in range(1, 30):
        totals = SchedulerStats(
            steps=count, prompt_tokens_computed=1000 * count, seconds_stepping=0.03 * count
        )
        told.report(totals, 0, float(count))
    assert silent["prompt_token_s"] == pytest.approx(told["prompt_token_s"], rel=0.2)
    assert silent["prompt_token_s"] < 5e-5


FULL = 64
"""Requests that decode at one engine, of those that it could."""


@given(
    st.integers(1, 100), st.integers(0, 8192), st.integers(1, 100), st.floats(1e-3, 60),
    st.floats(1e-3, 60),
)  # fmt: skip
def test_an_engine_whose_first_report_was_slow_is_tried_again_before_its_twin_is_full(
    steps: int, prompt_tokens: int, tokens: int, seconds: float, move_s: float
) -> None:
    fleet = Fleet(1, 2)
    first = idle(
        steps=steps, prompt_tokens_computed=prompt_tokens, tokens_generated=tokens,
        seconds_stepping=seconds,
        kv_transfer=KVTransferStats(
            loads_completed=1, blocks_received=10, seconds_receiving=move_s
        ),
    )  # fmt: skip
    fleet.rows["d0"].report(idle(kv_transfer=KVTransferStats()), 0, 0.0)
    fleet.rows["d0"].report(first, 0, 0.5)
    fleet.rows["d1"].report(idle(kv_transfer=KVTransferStats()), 0, 0.0)
    for count in range(1, FULL):
        now = 0.5 * count
        usual = idle(
            steps=40 * count, tokens_generated=40 * count * count, num_running=count,
            seconds_stepping=40 * count * 6e-3 + 40 * count * count * 1e-4,
            kv_transfer=KVTransferStats(
                loads_completed=count, blocks_received=10 * count, seconds_receiving=7e-3 * count
            ),
        )  # fmt: skip
        fleet.rows["d1"].report(usual, 0, now)
        fleet.rows["d0"].report(first, 0, now)
        if fleet.go(request(10, start=1000 * count, output=100.0), now)[1] == "d0":
            return
        fleet.rows["d1"].charge(0, planned=-1)
    pytest.fail("an idle engine never got work")


def test_an_engine_that_was_slow_for_long_is_tried_again_after_a_while() -> None:
    table = EngineTable()
    slow, usual = table.add("slow", 0), table.add("usual", 1)
    for count in range(2400):
        was_slow = min(count, 100)
        totals = SchedulerStats(steps=10 * was_slow, seconds_stepping=5.0 * was_slow)
        slow.report(totals, 0, 0.5 * count)
        usual.report(
            SchedulerStats(steps=10 * count, seconds_stepping=0.05 * count), 0, 0.5 * count
        )
        if count == 100:
            assert slow["step_s"] > 4 * usual["step_s"]
    assert slow["step_s"] < 2 * usual["step_s"]


def test_the_load_of_a_pool_fades() -> None:
    table = EngineTable()
    row_of(table)
    assert table.prompt_load(0.0) == 0
    for second in range(100):
        table.computed(0.5, float(second))
    assert table.prompt_load(99.0) == pytest.approx(0.5, abs=0.05)
    assert table.prompt_load(200.0) < 0.01
