"""Pools written down as a few words for each engine, and the router's decisions about them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from diptych_protocol.router_settings import Disaggregate
from diptych_router.choosing.first_token import FirstToken
from diptych_router.choosing.fleet_table import FleetTable
from diptych_router.choosing.policies.least_loaded import POLICY
from diptych_router.choosing.policy import Decision, Draw, Policy, RequestView
from diptych_router.engines.engine_table import Role
from diptych_router.engines.health_book import Failure


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
