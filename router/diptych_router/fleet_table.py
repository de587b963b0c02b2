"""All that a router knows of both pools, and the decisions that follow from it. Pure.

`Pools` keeps it up to date from its lines to the engines, and the simulator from its pods.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from diptych_protocol.config import Disaggregate
from diptych_protocol.wire import PrefixChanges
from diptych_router.engine_table import EngineRow, EngineTable, Flags, FleetRates, Floats, distinct
from diptych_router.pair_rates import NOWHERE, PairRates, Place, nearness
from diptych_router.policy import (
    Decision,
    Draw,
    Engines,
    Policy,
    RequestView,
    Role,
    choose,
    successor,
)
from diptych_router.prefixes.block_keys import BlockNaming
from diptych_router.prefixes.known_prefixes import KnownPrefixes
from diptych_router.prefixes.prefix_index import Lengths
from diptych_router.slo.first_token import FirstToken, expected

ANY_REQUEST = RequestView()
Tokens = dict[Role, Floats]
"""Role -> [engines] tokens of a prompt."""


class FleetTable:
    """Two tables of engines, and what the engines remember."""

    def __init__(self, policy: Policy, draw: Draw, disaggregate: Disaggregate = "auto") -> None:
        """draw: decides between engines of the same cost."""
        rates = self._rates = FleetRates()
        self.pairs = PairRates()
        self.tables: dict[Role, EngineTable] = {
            "prefill": EngineTable(rates),
            "decode": EngineTable(rates, self.pairs),
        }
        self.known = KnownPrefixes()
        self._policy, self._draw, self._disaggregate = policy, draw, disaggregate
        self._rows: dict[str, tuple[Role, EngineRow]] = {}
        self._fingerprints: dict[str, float] = {}

    # --- who is there -------------------------------------------------------------------------

    def add(self, role: Role, key: str) -> EngineRow:
        """A new engine, not usable yet."""
        row = self.tables[role].add(key, self.known.place(key))
        self.pairs.add(sends=role == "prefill")
        self._rows[key] = role, row
        return row

    def remove(self, key: str) -> None:
        role, row = self._rows.pop(key)
        self.pairs.remove(row.at, sends=role == "prefill")
        self.tables[role].remove(row)
        self.known.forget(key)

    def is_up(
        self, row: EngineRow, fingerprint: str, name: str = "", place: Place = NOWHERE
    ) -> None:
        """Another process answers, which fits together with those of the same fingerprint.

        name: its `engine_id`.
        """
        number = self._fingerprints.setdefault(fingerprint, float(len(self._fingerprints)))
        row["fingerprint"] = number
        self.known.restarted(row.key)
        role, _ = self._rows[row.key]
        trips = self.tables["decode"].trips
        self.pairs.is_at(row.at, name, place, trips, sends=role == "prefill")

    def take_prefixes(self, key: str, changes: PrefixChanges, most_blocks: int) -> bool:
        """What an engine tells of its blocks; see `KnownPrefixes.take`."""
        return self.known.take(key, changes, most_blocks)

    # --- decisions ----------------------------------------------------------------------------

    def choose(
        self,
        request: RequestView,
        now: float,
        full: Collection[str] = (),
        disaggregate: Disaggregate | None = None,
    ) -> Decision | None:
        """The engines for a new attempt; None: there are none now. Those that may hang come last.

        full: keys of engines that have no room. Where prefill has none, decode engines do not
            compute the prompt in its stead: that would make all streams slow.
        disaggregate: other than this router's.
        """
        how = disaggregate or self._disaggregate
        full_at = [self._rows[key] for key in full if key in self._rows]
        if how == "auto" and any(role == "prefill" for role, _ in full_at):
            how = "always"
        cached, held = self._cached(request)
        elsewhere = self._elsewhere(cached, held)
        adapter = request.adapter
        loading: dict[Role, Floats] = {}
        if adapter:
            loading = {role: _adapter_s(t, adapter, now) for role, t in self.tables.items()}
        for lively in (True, False):
            prefill, decode = (
                Engines(
                    table,
                    _usable(table, lively),
                    cached[role],
                    elsewhere[role],
                    now,
                    loading[role] if adapter else None,
                )
                for role, table in self.tables.items()
            )
            for role, row in full_at:
                (prefill if role == "prefill" else decode).usable[row.at] = False
            decision = choose(self._policy, request, prefill, decode, self._draw, how, self.pairs)
            if decision is not None:
                break
        if decision is None:
            return None
        full_prefill = any(role == "prefill" for role, _ in full_at)
        if decision.prefill is None and how != "never" and full_prefill:
            return None
        if decision.fetch_tokens:
            return replace(decision, fetch=self._holder(decision, held))
        return decision

    def _holder(self, decision: Decision, held: Tokens) -> str | None:
        """Who has the tokens that are to be fetched: one of the nearest, if several do."""
        taker = decision.prefill or decision.decode
        fingerprint = self._rows[taker][1]["fingerprint"]
        holders = [
            table.rows[at].key
            for role, table in self.tables.items()
            for at in (_lenders(table) & (held[role] == decision.fetch_tokens))
            .nonzero()[0]
            .tolist()
            if table.rows[at]["fingerprint"] == fingerprint
        ]
        if len(holders) > 1:
            holders = self.nearest(taker, holders)
        return holders[self._draw(len(holders))] if holders else None

    def nearest(self, key: str, others: Sequence[str]) -> list[str]:
        """Those of some engines that are nearest to one, as far as is known."""
        place = self._place(key)
        near = [nearness(place, self._place(other)) for other in others]
        return [other for other, how in zip(others, near, strict=True) if how == min(near)]

    def _place(self, key: str) -> Place:
        role, row = self._rows[key]
        return self.pairs.place(row.at, sends=role == "prefill")

    def successor(self, fingerprint: str, usable: Collection[str], now: float) -> str | None:
        """The decode engine, of some usable ones, that should take over KV of this fingerprint."""
        table = self.tables["decode"]
        fit: Flags = np.zeros(len(table), np.bool_)
        for key in usable:
            fit[self._rows[key][1].at] = True
        number = self._fingerprints.get(fingerprint, -1.0)
        nothing = np.zeros(len(table))
        engines = Engines(table, fit, nothing, nothing, now)
        return successor(self._policy, engines, number, self._draw)

    def first_token(self, request: RequestView, decision: Decision) -> FirstToken | None:
        """When the first token is expected after this choice; None: too little is known."""
        known = self._rows.get(decision.prefill or decision.decode)
        if known is None or not (known[1]["told_steps"] or self._rates.steps.told):
            return None
        queued, of_tenants = known[1].queue()
        return expected(decision.terms, queued, of_tenants, request.tenant, decision.to_compute)

    def placed(self, request: RequestView, decision: Decision, now: float) -> None:
        """A request goes to these engines, which will have the KV of its prompt."""
        computes = decision.prefill or decision.decode
        for key in {decision.prefill, decision.decode} - {None}:
            known = self._rows.get(str(key))
            if known is None:
                continue
            _, row = known
            row["given"] += 1
            if request.adapter:
                row.adapters.expect(request.adapter, now)
            if key == computes:
                row.place(decision.to_compute, now, request.tenant)
            naming = self._naming(request, row)
            if request.keys is None or naming is None:
                continue
            keys = request.keys(naming)
            if len(keys):
                self.known.expect(row.key, keys)

    # --- what engines have of a prompt --------------------------------------------------------

    def _cached(self, request: RequestView) -> tuple[Tokens, Tokens]:
        """How many tokens of the prompt each engine has, with those that were sent there a moment
        ago, and without."""
        nothing = {role: np.zeros(len(table)) for role, table in self.tables.items()}
        if request.keys is None or not self.known.num_known:
            return nothing, nothing
        if request.adapter:
            mine = {role: self._cached_by_adapter(t, request) for role, t in self.tables.items()}
            return mine, nothing
        soon = nothing
        now = {role: np.zeros(len(table)) for role, table in self.tables.items()}
        lengths: dict[float, tuple[Lengths, Lengths]] = {}
        """By block size."""
        for role, table in self.tables.items():
            sizes, places = table.column("block_size"), table.places
            kinds = distinct(sizes)
            for size in kinds:
                if size not in lengths:
                    lengths[size] = self.known.lengths(request.keys(BlockNaming(int(size))))
                among = slice(None) if len(kinds) == 1 else sizes == size
                for found, blocks in zip((soon, now), lengths[size], strict=True):
                    found[role][among] = blocks[places[among]] * size
        return soon, now

    def _cached_by_adapter(self, table: EngineTable, request: RequestView) -> Floats:
        """Engines may have other files under the same name, and most do not have it loaded."""
        cached: Floats = np.zeros(len(table))
        for at, row in enumerate(table.rows):
            naming = self._naming(request, row)
            if naming is not None and request.keys is not None:
                found = self.known.num_cached([row.key], request.keys(naming))
                cached[at] = found[row.key] * naming.block_size
        return cached

    def _elsewhere(self, cached: Tokens, held: Tokens) -> Tokens:
        """How many tokens of the prompt each engine has, or could fetch from another one."""
        if held is cached or not any(tokens.any() for tokens in held.values()):
            return cached
        lent = {role: held[role] * _lenders(table) for role, table in self.tables.items()}
        fingerprints = {role: table.column("fingerprint") for role, table in self.tables.items()}
        kinds = {kind for values in fingerprints.values() for kind in distinct(values)}
        found = {role: tokens.copy() for role, tokens in cached.items()}
        for kind in kinds:
            among = {
                role: slice(None) if len(kinds) == 1 else values == kind
                for role, values in fingerprints.items()
            }
            most = max(float(lent[role][of].max(initial=0.0)) for role, of in among.items())
            for role, of in among.items():
                found[role][of] = np.maximum(found[role][of], most)
        return found

    def _naming(self, request: RequestView, row: EngineRow) -> BlockNaming | None:
        """How an engine names the blocks of a prompt; None: that is not known."""
        digest = self.known.adapters(row.key).get(request.adapter) if request.adapter else ""
        return None if digest is None else BlockNaming(int(row["block_size"]), digest)


def _adapter_s(table: EngineTable, name: str, now: float) -> Floats:
    """[engines] Seconds to load the adapter of this name; 0 where it is loaded."""
    lacking = np.array([not row.adapters.has(name, now) for row in table.rows], np.float64)
    seconds: Floats = lacking * table.column("adapter_s")
    return seconds


def _lenders(table: EngineTable) -> Flags:
    """[engines] From whom a prefix can be fetched: not from those that may hang."""
    lends: Flags = (table.column("lends") > 0) & (table.column("silent") == 0)
    return lends


def _usable(table: EngineTable, lively: bool) -> Flags:
    """[engines] Who may get requests. lively: but for those that may hang."""
    usable: Flags = table.column("usable") > 0
    if lively:
        usable &= table.column("silent") == 0
    return usable
