"""Requests with an adapter go where it is loaded, if that saves more than it costs."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from toy_pools import EngineView, fleet_of

from diptych_protocol import SchedulerStats
from diptych_router.choosing.fleet_table import FleetTable
from diptych_router.choosing.policies import POLICIES
from diptych_router.choosing.policy import RequestView
from diptych_router.engines.engine_table import ADAPTER_PRIOR, EXPECTED_S, EngineRow, LoadedAdapters
from diptych_router.engines.known_prefixes import MAX_ADAPTERS

SQL = RequestView(100, 50.0, adapter="sql")
PLAIN = RequestView(100, 50.0)
POLICY_NAMES = ["prefix_aware", "least_loaded"]


def fleet(policy: str, engines: int = 4) -> tuple[FleetTable, dict[str, EngineRow]]:
    """Prefill engines `p0`… and decode engines `d0`…, all idle."""
    first, second = (
        [EngineView(f"{letter}{number}", "f") for number in range(engines)] for letter in "pd"
    )
    table = fleet_of(first, second, POLICIES[policy], Random(1).randrange, "always")
    return table, {row.key: row for pool in table.tables.values() for row in pool.rows}


def ways(table: FleetTable, view: RequestView, count: int = 50) -> Counter[tuple[str | None, str]]:
    """Where so many requests would go, none of which is sent."""
    chosen = [table.choose(view, 0.0) for _ in range(count)]
    return Counter((d.prefill, d.decode) for d in chosen if d is not None)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_request_goes_where_its_adapter_is_loaded(policy: str) -> None:
    table, rows = fleet(policy)
    for key in ("p2", "d1"):
        rows[key].adapters.tell(["poems", "sql"], 0.0)
    assert ways(table, SQL) == {("p2", "d1"): 50}
    assert len(ways(table, PLAIN)) > 1, "others go anywhere"


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_long_queue_outweighs_a_short_load(policy: str) -> None:
    table, rows = fleet(policy)
    rows["p2"].adapters.tell(["sql"], 0.0)
    rows["p2"]["open_tokens"] = 1e6
    rows["p2"]["free_at"] = 60.0
    assert not any(prefill == "p2" for prefill, _ in ways(table, SQL))


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_burst_with_a_new_adapter_stays_together(policy: str) -> None:
    """Even before the first engine has said that it loads it."""
    table, _ = fleet(policy)
    decision = table.choose(SQL, 0.0)
    assert decision is not None
    table.placed(SQL, decision, 0.0)
    assert ways(table, SQL) == {(decision.prefill, decision.decode): 50}


def test_both_engines_of_a_pair_are_charged_for_the_load() -> None:
    table, _ = fleet("prefix_aware")
    decision = table.choose(SQL, 0.0)
    assert decision is not None
    assert decision.terms["adapter_s"] == pytest.approx(2 * ADAPTER_PRIOR[0])
    assert "adapter_s" not in getattr(table.choose(PLAIN, 0.0), "terms", {})


def test_how_long_a_load_takes_is_learned() -> None:
    table, rows = fleet("prefix_aware", 2)
    for number in range(1, 60):
        for key, seconds in (("p0", 0.05), ("d0", 0.05)):
            stats = SchedulerStats(
                steps=number, adapters_loaded=number, seconds_loading_adapters=number * seconds
            )
            rows[key].report(stats, 0, float(number))
    assert rows["p0"]["adapter_s"] == pytest.approx(0.05, rel=0.2)
    assert rows["p1"]["adapter_s"] == pytest.approx(0.05, rel=0.2), "others tell nothing"
    assert len(ways(table, SQL)) > 1


def test_what_was_sent_counts_as_loaded_for_a_while() -> None:
    adapters = LoadedAdapters()
    adapters.expect("sql", 0.0)
    adapters.tell([], 1.0)
    assert adapters.has("sql", EXPECTED_S - 0.1)
    assert not adapters.has("sql", EXPECTED_S)
    assert not adapters.has("poems", 0.0)
    adapters.tell(["poems"], EXPECTED_S + 1.0)
    assert adapters.has("poems", 1e9)
    assert not adapters.has("sql", 0.0), "what is over is forgotten"


def test_an_engine_cannot_make_a_router_remember_without_bounds() -> None:
    adapters = LoadedAdapters()
    many = [f"a{number}" for number in range(MAX_ADAPTERS + 1)]
    adapters.tell(many, 0.0)
    assert not adapters.has("a0", 0.0)
    for name in many:
        adapters.expect(name, 0.0)
    assert not adapters.has(many[-1], 1.0)


def test_an_engine_that_restarted_has_loaded_nothing() -> None:
    _, rows = fleet("least_loaded")
    rows["p0"].adapters.tell(["sql"], 0.0)
    rows["p0"].restarted()
    assert not rows["p0"].adapters.has("sql", 0.0)
