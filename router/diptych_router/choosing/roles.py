"""Decides which engine changes its role, where roles are elastic (`elasticRoles`).

Every engine can compute prompts and generate. Its role is a lease on traffic: prefill engines get
prompts, decode engines get what those hand over. The first of a service's routers gives the roles,
and engines tell them to all. The *strain* of a pool is how much of a promise of `slo` it uses up:
of the first token's in the prefill pool, of the later tokens' in the decode pool. An engine turns
if that lowers the larger of both strains by so much that demand may change by a fifth before it
pays to turn back. The caller passes the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from diptych_router.choosing.fleet_table import FleetTable
from diptych_router.engines.engine_table import ROLES, EngineRow, Role

STRAINED: Final = 0.8
"""Below this strain nobody turns: the promises are kept."""
WORTH: Final = 0.8
"""A turn leaves at most this part of the larger strain. So a turn back pays only if demand changes
by more than (1 - WORTH²) / (1 + WORTH²) = 0.22 of itself."""
PAUSE_S: Final = 0.5
"""How long a strain lasts before an engine turns, and from turn to turn: reports come late."""
REST_S: Final = 5.0
"""From a turn to one in the other direction."""
ANSWER_S: Final = 2.0
"""An engine that has not turned after this time does not know of roles, or is gone."""
WINDOW_S: Final = 1.0
"""For the demand, what was seen this long ago counts 1/e of what is seen now."""
CROWDED: Final = 1 / 16
"""If more streams wait than this part of those that run, there is no room for more: a step takes in
those that have only just come."""
LEAST_TOKENS_S: Final = 1e-3
OTHER: Final[Mapping[Role, Role]] = {"prefill": "decode", "decode": "prefill"}


class Demand(NamedTuple):
    """What a pool has to do, as parts of its promise."""

    fixed: float = 0.0
    """What a request takes at an idle engine, and no other engine could change."""
    shared: float = 0.0
    """What all the work would take one engine besides."""
    held: float = 0.0
    """The engines that it would fill."""

    def strain(self, engines: int) -> float:
        """Return the strain of so many engines."""
        if not engines:
            return math.inf
        return max(self.fixed + self.shared / engines, self.held / engines)


class RoleTurns:
    """When engines turn, and in which direction."""

    def __init__(self, least: int) -> None:
        """least: engines that keep each role."""
        self._least = least
        self._newest: Role | None = None
        """The role that the newest turn gave."""
        self._turned_at = -math.inf
        self._calm_at = -math.inf
        """When the strain was last low."""
        self._asked_at = -math.inf
        """When an engine was given a role that it has not taken yet."""

    def turned(self, role: Role, now: float) -> None:
        """An engine has taken a role, by whatever router."""
        self._newest, self._turned_at, self._asked_at = role, now, -math.inf

    def due(
        self, demand: Mapping[Role, Demand], engines: Mapping[Role, int], now: float
    ) -> Role | None:
        """Return the role that one more engine takes now; None: all stay what they are."""
        before = max(demand[role].strain(engines[role]) for role in ROLES)
        if before < STRAINED:
            self._calm_at = now
        if now < max(max(self._calm_at, self._turned_at) + PAUSE_S, self._asked_at + ANSWER_S):
            return None
        for role, giver in OTHER.items():
            back = self._newest == giver
            if engines[giver] <= self._least or (back and now < self._turned_at + REST_S):
                continue
            taken = demand[role].strain(engines[role] + 1)
            if max(taken, demand[giver].strain(engines[giver] - 1)) <= WORTH * before:
                self._asked_at = now
                return role
        return None


class _Load(NamedTuple):
    """What engines have to do, by their reports."""

    computing: float = 0.0
    """Seconds of prompts that prefill engines compute in a second."""
    backlog_s: float = 0.0
    """Seconds of prompts that wait there."""
    streams: float = 0.0
    """At decode engines, those that wait for room included."""
    tokens_s: float = 0.0
    """Tokens a second of all streams."""
    memory: float = 0.0
    """KV memory that they use, in engines."""
    running: float = 0.0
    """Those of the streams that do not wait."""


class Watch:
    """Measures the demand by what engines report, and says which engine turns."""

    def __init__(self, fleet: FleetTable, least: int, ttft_s: float, gap_s: float) -> None:
        """ttft_s and gap_s: what is promised, before the first token and between the later ones."""
        self._fleet = fleet
        self._turns = RoleTurns(least)
        self._ttft_s, self._gap_s = ttft_s, gap_s
        self._load = _Load()
        self._seen_at = -math.inf
        self._totals = (0.0, 0)
        """As of then: seconds of prompts in the prefill pool, tokens in the decode pool."""
        self.turned = self._turns.turned

    def due(self, home: Mapping[str, Role], now: float) -> str | None:
        """Return the key of an engine that turns now; None: none does, or another router gives
        the roles. Call it often, and `turned` when an engine has turned.

        A role that lost all its engines gets back those that had it from the start. So does each
        role while not all engines fit together, as in a rollout.

        home: each engine's role from the start, by its key.
        """
        able = {role: self._able(role) for role in ROLES}
        demand = self._demand(able, now)
        if any(table.share.number for table in self._fleet.tables.values()):
            return None
        alike = len({row["fingerprint"] for rows in able.values() for row in rows}) == 1
        for role, rows in able.items():
            away = [row for row in able[OTHER[role]] if home[row.key] == role]
            if away and not (alike and rows):
                return away[0].key
        if not (alike and all(able.values())):
            return None
        wanted = self._turns.due(demand, {role: len(rows) for role, rows in able.items()}, now)
        if wanted is None:
            return None
        # Whoever had the role from the start; of these, whoever has least to finish.
        burden = "rows" if wanted == "prefill" else "free_at"
        givers = able[OTHER[wanted]]
        return min(givers, key=lambda row: (home[row.key] != wanted, row[burden])).key

    def _able(self, role: Role) -> list[EngineRow]:
        table = self._fleet.tables[role]
        return [row for row in table.rows if table.eligibility.barred_or_silent[row.at] == 0]

    def _demand(self, able: Mapping[Role, list[EngineRow]], now: float) -> dict[Role, Demand]:
        load = self._measure(able, now)
        shared = load.computing + load.backlog_s / self._ttft_s
        decode = able["decode"]
        idle_s = sum(row["step_s"] + row["row_s"] for row in decode) / max(len(decode), 1)
        gap_s = idle_s
        if load.streams > len(decode):  # else another engine would change nothing
            gap_s = max(gap_s, load.streams / max(load.tokens_s, LEAST_TOKENS_S))
        fixed, waits = idle_s / self._gap_s, (gap_s - idle_s) / self._gap_s
        held = load.memory
        if load.streams > (1.0 + CROWDED) * load.running > 0:
            held = max(held, len(decode) * load.streams / load.running)
        return {
            "prefill": Demand(shared=shared),
            "decode": Demand(fixed, waits * len(decode), held),
        }

    def _measure(self, able: Mapping[Role, list[EngineRow]], now: float) -> _Load:
        """Return the load of late. Streams and tokens are measured, not predicted: by Little's law
        a stream gets a token after as many seconds as there are streams for each token a second."""
        passed_s, self._seen_at = now - self._seen_at, now
        if passed_s <= 0:
            return self._load
        prefill, decode = (self._fleet.tables[role] for role in ROLES)
        before = self._totals
        self._totals = prompts_s, tokens = prefill.prompt_seconds, decode.tokens_generated
        memory = (
            row["used_tokens"] / (row["used_tokens"] + row["free_tokens"]) for row in able["decode"]
        )
        found = _Load(
            (prompts_s - before[0]) / passed_s,
            sum(max(row["free_at"] - now, 0.0) for row in able["prefill"]),
            sum(row.last.num_running + row.last.num_waiting for row in able["decode"]),
            (tokens - before[1]) / passed_s,
            sum(memory),
            sum(row.last.num_running for row in able["decode"]),
        )
        part = -math.expm1(-passed_s / WINDOW_S)
        self._load = _Load(*(a + (b - a) * part for a, b in zip(self._load, found, strict=True)))
        return self._load
