"""A router: the product's own tables and decisions, told by pods what engines tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from diptych.simulator.plan import Pod, SimulatedService
from diptych.simulator.workload import Request
from diptych_protocol.engine_stats import SchedulerStats
from diptych_protocol.wire import Heartbeat, PrefixChanges
from diptych_router.choosing.first_token import FirstToken
from diptych_router.choosing.fleet_table import FleetTable
from diptych_router.choosing.policy import Decision
from diptych_router.choosing.roles import Watch
from diptych_router.engines.engine_table import Role
from diptych_router.engines.pair_rates import NOWHERE, Location
from diptych_router.requests.pools.pools import EXPECTED_S
from diptych_router.requests.promises import Caution
from diptych_router.requests.request_table import FIRST_GUESS_TOKENS, NEWEST_PART

FINGERPRINT = "same"


class WouldBeLate(Exception):
    """The first token would come too late."""


class Router:
    """One router's knowledge, as `Pools` and `RequestTable` keep it."""

    def __init__(self, plan: SimulatedService, pods: Sequence[Pod], seed: int) -> None:
        """seed: decides between engines of the same cost."""
        self.fleet = FleetTable(plan.policy, Random(seed).randrange, plan.disaggregate)
        self.rows = {pod.key: self.fleet.add(pod.role, pod.key) for pod in pods}
        for pod in pods:
            row = self.rows[pod.key]
            row["usable"], row["block_size"] = True, pod.pool.limits.block_size
            row["lends"] = True
            row["processors"], row["processors_part"] = plan.one_machine, 1.0
            location = Location(zone=f"zone-{pod.zone}") if plan.zones.told else NOWHERE
            self.fleet.is_up(row, FINGERPRINT, pod.key, location)
            self.fleet.known.take(pod.key, PrefixChanges(0, whole=True), 0)
        self.roles: Watch | None = None
        if plan.elastic_gap_s is not None and plan.promised_s is not None:
            self.roles = Watch(self.fleet, 1, plan.promised_s, plan.elastic_gap_s)
        self._caution = None if plan.promised_s is None else Caution(plan.promised_s)
        self.expected: FirstToken | None = None
        """When the first token of the request that was taken on last is expected."""
        self._usual_output = FIRST_GUESS_TOKENS
        self._age_at = 0.0

    def choose(self, request: Request, now: float, *, arrives: bool = False) -> Decision | None:
        """The engines for a request; None: there are none.

        Raises `WouldBeLate` for one that arrives and would not keep what is promised.
        """
        if now >= self._age_at:
            self._age_at = now + EXPECTED_S
            self.fleet.known.index.age()
        view = replace(request.view, output_tokens=self._usual_output)
        decision = self.fleet.choose(view, now)
        if decision is not None:
            if arrives and self._caution is not None:
                self.expected = self.fleet.first_token(view, decision)
                if self.expected is not None and self._caution.late_s(self.expected) > 0:
                    raise WouldBeLate
            self.fleet.placed(view, decision, now)
        return decision

    def turned(self, key: str, role: Role, now: float) -> None:
        """A pod has said that it has another role."""
        self.fleet.turn(key, key)
        if self.roles is not None:
            self.roles.turned(role, now)

    def saw_first(self, expected: FirstToken | None, took_s: float) -> None:
        """A user has the first token of a request of which that was expected."""
        if self._caution is not None and expected is not None:
            self._caution.saw(expected, took_s)

    def saw_end(self, output: int) -> None:
        """An answer has ended, after so many tokens."""
        self._usual_output += (output - self._usual_output) * NEWEST_PART

    def hear(
        self,
        pod: Pod,
        stats: SchedulerStats | None,
        heartbeat: Heartbeat,
        received: int,
        news: PrefixChanges | None,
        now: float,
    ) -> None:
        """A pod's report, and what it began and ceased to remember."""
        if stats is not None:
            self.rows[pod.key].heard(heartbeat, received, now)
            self.rows[pod.key].report(stats, received, now)
        if news is not None:
            self.hear_prefixes(pod, news)

    def hear_prefixes(self, pod: Pod, news: PrefixChanges) -> None:
        """What a pod remembers, or will."""
        self.fleet.known.take(pod.key, news, pod.pool.limits.num_blocks)

    def successor(self, now: float) -> str | None:
        """Who takes over when the planned decode engine is lost."""
        table = self.fleet.tables["decode"]
        usable = [row.key for row in table.rows if row["usable"]]
        return self.fleet.successor(FINGERPRINT, usable, now)
