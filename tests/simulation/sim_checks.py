"""What must hold after every event, and what must hold when everything has come to rest."""

from __future__ import annotations

from collections.abc import Mapping, Sized

from engine_kit.block_checks import check_blocks
from sim_engine import SimEngine
from sim_router import SimRouter

from diptych_kv_transfer.tables.lease import LIVE, LeaseState


def check_memory(engine: SimEngine, contents: Mapping[bytes, tuple[int, ...]]) -> None:
    """P2: every prefix that may be read stands in its block, and blocks are held or free."""
    check_blocks(engine.pool)
    for block_hash, block in engine.pool.remembered().items():
        wanted = contents.get(block_hash)
        assert wanted is not None, f"P2: {engine.name} remembers a prefix that nobody asked for"
        found = engine.memory.block(block)
        assert found == wanted, f"P2: {engine.name} remembers foreign KV in block {block}"


def check_engine_at_rest(engine: SimEngine) -> None:
    """P1 and P6: nothing is left of anything."""
    scheduler, hinge, name = engine.core.scheduler, engine.driver.hinge, engine.name
    tables: dict[str, Sized] = {
        "requests": scheduler.requests, "running": scheduler.running,
        "waiting": scheduler.waiting, "held": scheduler.held, "loading": scheduler.loading,
        "early loads": scheduler.early.loads, "lent": scheduler.leased,
        "load orders": scheduler.load_orders, "parked": scheduler.gate.parked,
        "promises": engine.core.hand_offs._promises, "leases": hinge.leases.leases,
        "early opens": hinge.leases._early, "loads": hinge.loads.loads,
        "rejects": hinge.loads.rejects, "asked for": hinge.leases._asks,
        "unanswered": range(hinge.leases._asks._num_unanswered),
        "blocks in prefixes": scheduler.leased._in_prefixes,
        "fetches": engine.core.hand_offs.fetches._under_way,
        "remotes that never answered": [r for r in hinge.loads.remotes.values() if not r.hello],
    }  # fmt: skip
    left = {what: table for what, table in tables.items() if len(table)}
    assert not left, f"P1: {name} keeps {left}"
    pool = engine.pool
    assert pool.num_free == pool.num_blocks, (
        f"P1: {name} has {pool.num_free} of {pool.num_blocks} blocks free"
    )
    counts, loads, reports = hinge.leases.counts, hinge.loads, engine.driver.reports
    ended = {state: counts[state] for state in LeaseState if state not in LIVE}
    assert counts[LeaseState.PROMISED] == sum(ended.values()), f"P6: leases of {name}: {counts}"
    for state, number in ended.items():
        reported = reports[f"lease {state.value}"]
        assert reported == number, f"P6: {number} leases of {name} {state.value}, {reported} told"
    fetches = engine.core.hand_offs.fetches
    assert fetches.begun == fetches.completed + fetches.failed, f"P6: {name}: {fetches}"
    told = reports["load ok"] + reports["load failed"]
    started = loads.totals.loads_started + loads.prefixes_started
    assert started == told, f"P6: {started} loads of {name}, the ends of {told} told"


def check_router_at_rest(router: SimRouter) -> None:
    """P1: nothing is left of any request."""
    table = router.table
    placed = table._placements
    left = (table.requests, list(table.held), placed.by_core_id, placed.charges, table._turns)
    assert not any(left), f"P1: {router.name} keeps {left}"
    for link in router.links.by_name.values():
        assert link.open_tokens == 0, f"P1: {router.name} has {link.open_tokens} tokens open"
        assert link.planned == 0, f"P1: {router.name} plans {link.planned} requests"
