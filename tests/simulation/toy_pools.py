"""Pools written down as a few words for each engine, and the router's decisions about them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from diptych_protocol.engine_stats import SchedulerStats
from diptych_protocol.router_settings import Disaggregate
from diptych_protocol.wire import PrefixChanges
from diptych_router.choosing.first_token import FirstToken
from diptych_router.choosing.fleet_table import FleetTable
from diptych_router.choosing.policies.least_loaded import POLICY
from diptych_router.choosing.policies.prefix_aware import POLICY as PREFIX_AWARE
from diptych_router.choosing.policy import Decision, Draw, Policy, RequestView
from diptych_router.engines.block_holders import Keys
from diptych_router.engines.engine_table import EngineRow, Role
from diptych_router.engines.health_book import Failure
from diptych_router.engines.known_prefixes import BlockNaming


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine of a pool."""

    key: str
    fingerprint: str
    load: int = 0
    usable: bool = True
    silent: bool = False


class ForgetfulFleet:
    """The part of a `Fleet` that learns how engines do. This one learns nothing."""

    def first_token(self, request: RequestView, decision: Decision) -> FirstToken | None:
        return None

    def placed(self, request: RequestView, decision: Decision, now: float) -> None:
        pass

    def was_full(self, key: str) -> None:
        pass

    def went_well(self, *keys: str) -> None:
        pass

    def went_badly(self, key: str, failure: Failure) -> None:
        pass


def first(_: int) -> int:
    """Take the first of equals."""
    return 0


def fleet_of(
    prefill: Sequence[EngineView],
    decode: Sequence[EngineView],
    policy: Policy = POLICY,
    draw: Draw = first,
    disaggregate: Disaggregate = "auto",
) -> FleetTable:
    fleet = FleetTable(policy, draw, disaggregate)
    pools: dict[Role, Sequence[EngineView]] = {"prefill": prefill, "decode": decode}
    for role, views in pools.items():
        for view in views:
            row = fleet.add(role, view.key)
            fleet.is_up(row, view.fingerprint)
            row["open_tokens"], row["usable"] = view.load, view.usable
            row["silent"] = view.silent
    return fleet


def choose(
    request: RequestView,
    prefill: Sequence[EngineView],
    decode: Sequence[EngineView],
    full: Collection[str] = (),
) -> Decision | None:
    """By the load alone, the first of equals."""
    return fleet_of(prefill, decode).choose(request, 0.0, full)


def successor(decode: Sequence[EngineView], fingerprint: str) -> str | None:
    """Who takes over KV of this fingerprint, by the load alone."""
    usable = [view.key for view in decode if view.usable]
    return fleet_of([], decode).successor(fingerprint, usable, 0.0)


SIZE = 16
"""Tokens of a block."""


def chain(start: int, blocks: int) -> Keys:
    return np.arange(start + 1, start + 1 + blocks, dtype=np.uint64)


def request(blocks: int, start: int = 0, output: float = 100.0) -> RequestView:
    """A prompt of so many full blocks, and one token."""

    def keys(_: BlockNaming) -> Keys:
        return chain(start, blocks)

    return RequestView(blocks * SIZE + 1, output, keys=keys)


def idle(blocks: int = 10_000, free: int | None = None, **changes: Any) -> SchedulerStats:
    return SchedulerStats(
        blocks_total=blocks, blocks_free=blocks if free is None else free, **changes
    )


class Fleet:
    """Pools of engines `p0`, `p1`… and `d0`, `d1`… that have reported once."""

    def __init__(
        self, prefill: int, decode: int, disaggregate: Disaggregate = "always", seed: int = 0
    ) -> None:
        first, second = (
            [EngineView(f"{letter}{number}", "f") for number in range(count)]
            for letter, count in (("p", prefill), ("d", decode))
        )
        draw = Random(seed).randrange
        self.table: FleetTable = fleet_of(first, second, PREFIX_AWARE, draw, disaggregate)
        self.rows: dict[str, EngineRow] = {
            row.key: row for table in self.table.tables.values() for row in table.rows
        }
        for row in self.rows.values():
            row["block_size"] = SIZE
            row.report(idle(), 0, 0.0)
            self.table.known.take(row.key, PrefixChanges(0, whole=True), 10_000)

    def remembers(self, key: str, keys: Keys, on_disk: Keys | None = None) -> None:
        """on_disk: those of them that it has there only."""
        stored = b"" if on_disk is None else on_disk.tobytes()
        news = PrefixChanges(1, keys.tobytes(), to_disk=stored)
        self.table.known.take(key, news, 10_000)

    def go(self, view: RequestView, now: float = 0.0) -> tuple[str | None, str]:
        """Choose, and place it there."""
        decision = self.table.choose(view, now)
        assert decision is not None
        self.table.placed(view, decision, now)
        if decision.prefill is not None:
            self.rows[decision.decode].charge(0, planned=1)
        return decision.prefill, decision.decode
