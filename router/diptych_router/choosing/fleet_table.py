"""All that a router knows of both pools, and the decisions that follow from it. No I/O.

`Pools` keeps it up to date from its connections to the engines, and the simulator from its pods.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import count
from operator import or_
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diptych_protocol.router_settings import Disaggregate
from diptych_router.choosing.first_token import FirstToken, expected
from diptych_router.choosing.policy import (
    TOO_MUCH,
    Decision,
    Draw,
    Policy,
    PoolView,
    Priced,
    RequestView,
    choose,
)
from diptych_router.engines.engine_table import EngineRow, EngineTable, Floats, Role
from diptych_router.engines.known_prefixes import (
    BlockNaming,
    KnownPrefixes,
    Leading,
    lengths,
    members,
)
from diptych_router.engines.pair_rates import NOWHERE, Location, PairRates, nearness

FOR_A_PAIR = RequestView(disaggregate="always")
Tokens = dict[Role, Floats]
"""Role -> [engines] tokens of a prompt."""


class _Remembered(NamedTuple):
    cached: Tokens
    """In memory, including what was sent there a moment ago."""
    held: Sequence[Leading] = ()
    """Without; in tokens."""
    tie: int | None = None
    """The key of the first block that nobody has. Until an engine has told of it, requests that
    begin alike have the same one, at whatever router."""
    stored: Mapping[Role, Floats] = MappingProxyType({})
    """See `PoolView.stored`."""


class FleetTable:
    """Two tables of engines, and the prefixes that they have cached."""

    def __init__(self, policy: Policy, draw: Draw, disaggregate: Disaggregate = "auto") -> None:
        """draw: decides between engines of the same cost."""
        self.pairs = PairRates()
        self.tables: dict[Role, EngineTable] = {
            "prefill": EngineTable(),
            "decode": EngineTable(self.pairs),
        }
        self.known = KnownPrefixes()
        self._policy, self._draw, self._disaggregate = policy, draw, disaggregate
        self._rows: dict[str, EngineRow] = {}
        self._fingerprints: dict[str, float] = {}
        self._numbers = count()
        self._sharers: NDArray[np.intp] | None = None
        """[engines of both pools] Equal numbers: the same processors; None if none share any."""

    # --- who is there -------------------------------------------------------------------------

    def add(self, role: Role, key: str) -> EngineRow:
        """Add an engine, which is not usable yet."""
        place = self.known.place(key)
        row = self._rows[key] = self.tables[role].add(key, place)
        self.pairs.add(sends=role == "prefill")
        self._find_sharers()
        return row

    def remove(self, key: str) -> None:
        self._take_out(self._rows.pop(key))
        self.known.forget(key)
        self._find_sharers()

    def _take_out(self, row: EngineRow) -> None:
        self.pairs.remove(row.at, sends=self._sends(row))
        row.table.remove(row)

    def _sends(self, row: EngineRow) -> bool:
        return row.table is self.tables["prefill"]

    def turn(self, key: str, name: str = "") -> Role:
        """Give an engine the other role, which is returned. It keeps its numbers, and what is known
        of its prefixes. name: its `engine_id`."""
        row = self._rows[key]
        numbers, location = row.table.columns[:, row.at].copy(), self._location(key)
        other: Role = "decode" if self._sends(row) else "prefill"
        self._take_out(row)
        self.tables[other].admit(row, self.known.place(key), numbers)
        self.pairs.add(sends=other == "prefill")
        self._is_at(row, name, location)
        return other

    def is_up(
        self, row: EngineRow, fingerprint: str, name: str = "", location: Location = NOWHERE
    ) -> None:
        """Record that another process answers, which fits together with those of the same
        fingerprint. name: its `engine_id`."""
        row["fingerprint"] = self._number_of(fingerprint)
        self.known.restarted(row.key)
        self._is_at(row, name, location)

    def _is_at(self, row: EngineRow, name: str, location: Location) -> None:
        trips = self.tables["decode"].trips
        self.pairs.is_at(row.at, name, location, trips, sends=self._sends(row))
        self._find_sharers()

    def _find_sharers(self) -> None:
        told = np.concatenate([table.column["processors"] for table in self.tables.values()])
        unknown = (told == 0).nonzero()[0]
        told[unknown] = -1.0 - unknown
        different, sharers = np.unique(told, return_inverse=True)
        self._sharers = sharers if len(different) < len(told) else None

    def _number_of(self, fingerprint: str) -> float:
        """Before a new one gets a number, those that no engine has any more are forgotten."""
        if fingerprint not in self._fingerprints:
            used = {no for table in self.tables.values() for no in table.eligibility.fingerprints}
            kept = {name: no for name, no in self._fingerprints.items() if no in used}
            self._fingerprints = kept | {fingerprint: float(next(self._numbers))}
        return self._fingerprints[fingerprint]

    # --- decisions ----------------------------------------------------------------------------

    def choose(
        self,
        request: RequestView,
        now: float,
        full: Collection[str] = (),
        others: Collection[str] = (),
    ) -> Decision | None:
        """Return the engines for a new attempt; None if there are none now. Engines that may hang
        come last.

        full: keys of engines without room. If all prefill engines are full, decode engines do not
        compute the prompt instead, because that would slow all streams. others: keys of engines
        that are not for this request.
        """
        how = request.disaggregate or self._disaggregate
        left_out: list[EngineRow] = []
        full_prefill = False
        if full:
            left_out = [self._rows[key] for key in full if key in self._rows]
            full_prefill = any(map(self._sends, left_out))
        if how == "auto" and full_prefill:
            how = "always"
        if others:
            left_out += [self._rows[key] for key in others if key in self._rows]
        cached, held, tie, stored = self._remembered(request)
        if request.goes_on and self._may_go_on(request, cached) and not request.disaggregate:
            how = "auto" if how == "always" else how
        elsewhere = self._elsewhere(cached, held)
        adapter = request.adapter
        loading: dict[Role, Floats] = {}
        if adapter:
            loading = {role: _adapter_s(t, adapter, now) for role, t in self.tables.items()}
        sharers = self._sharers
        beside_s = {} if sharers is None else self._beside_s(sharers, now)
        for lively in (True, False):
            prefill, decode = [
                PoolView(
                    table,
                    _barred(table, lively, left_out),
                    cached[role],
                    request.prompt_tokens - cached[role],
                    elsewhere[role],
                    now,
                    loading[role] if adapter else None,
                    tie,
                    beside_s.get(role),
                    stored.get(role),
                )
                for role, table in self.tables.items()
            ]
            decision = choose(self._policy, request, prefill, decode, self._draw, how, self.pairs)
            if decision is not None:
                break
        if decision is None:
            return None
        if decision.prefill is None and how != "never" and full_prefill:
            return None
        if decision.fetch_tokens:
            return replace(decision, fetch=self._holder(decision, held))
        return decision

    def _may_go_on(self, request: RequestView, cached: Tokens) -> bool:
        """Whether a decode engine has all full blocks of a request that goes on after a loss. Then
        it may have kept the last block, too (`kv_keep`), and counts as if it has."""
        decode = cached["decode"]
        lacking = request.prompt_tokens - decode
        kept = (decode > 0) & (lacking <= self.tables["decode"].column["block_size"])
        cached["decode"] = np.where(kept, request.prompt_tokens - 1.0, decode)
        return bool(kept.any())

    def _beside_s(self, sharers: NDArray[np.intp], now: float) -> dict[Role, Floats]:
        """See `PoolView.beside_s`."""
        of_each = [t.waits(now) * t.column["processors_part"] for t in self.tables.values()]
        waits = np.concatenate(of_each)
        beside = np.maximum(np.bincount(sharers, waits)[sharers] - waits, 0.0)
        return {"prefill": beside[: len(of_each[0])], "decode": beside[len(of_each[0]) :]}

    def _holder(self, decision: Decision, held: Sequence[Leading]) -> str | None:
        """Who has the tokens that are to be fetched: one of the nearest, if several do."""
        taker = decision.prefill or decision.decode
        fingerprint = self._rows[taker]["fingerprint"]
        lenders = self._lenders().get(fingerprint, 0)
        having = [engines for tokens, engines in held if tokens == decision.fetch_tokens]
        bits = reduce(or_, having, 0) & lenders
        holding = members(bits, self.known.num_places)
        holders = [
            table.rows[at].key
            for table in self.tables.values()
            for at in holding[table.places].nonzero()[0].tolist()
        ]
        if len(holders) > 1:
            holders = self.nearest(taker, holders)
        return holders[self._draw(len(holders))] if holders else None

    def nearest(self, key: str, others: Sequence[str]) -> list[str]:
        """Return those of some engines that are nearest to one, as far as is known."""
        location = self._location(key)
        near = [nearness(location, self._location(other)) for other in others]
        return [other for other, how in zip(others, near, strict=True) if how == min(near)]

    def _location(self, key: str) -> Location:
        row = self._rows[key]
        return self.pairs.location(row.at, sends=self._sends(row))

    def successor(self, fingerprint: str, usable: Collection[str], now: float) -> str | None:
        """Return which of some usable decode engines should take over KV of this fingerprint."""
        table = self.tables["decode"]
        barred = np.full(len(table), TOO_MUCH)
        for key in usable:
            barred[self._rows[key].at] = 0.0
        nothing = np.zeros(len(table))
        engines = PoolView(table, barred, nothing, nothing, nothing, now)
        priced = Priced(self._policy, RequestView(), self._draw, "decode", engines)
        number = self._fingerprints.get(fingerprint, -1.0)
        chosen = priced.best(table.column["fingerprint"] == number)
        return None if chosen is None else table.rows[chosen].key

    def first_token(self, request: RequestView, decision: Decision) -> FirstToken | None:
        row = self._rows.get(decision.prefill or decision.decode)
        if row is None or not (row["told_steps"] or row.table.fleet_rates["told_steps"].told):
            return None
        queued, of_tenants = row.queue()
        return expected(decision.terms, queued, of_tenants, request.tenant, decision.to_compute)

    def placed(self, request: RequestView, decision: Decision, now: float) -> None:
        computes = decision.prefill or decision.decode
        for key in dict.fromkeys((decision.decode, computes)):
            row = self._rows.get(key)
            if row is None:
                continue
            column = row.table.column
            column["given"][row.at] += 1
            if request.adapter:
                row.adapters.expect(request.adapter, now)
            if key != computes:
                continue  # the other one cannot begin a prompt with what has not come yet
            naming = self._naming(request, key, column["block_size"][row.at])
            if naming is not None and request.keys is not None:
                self.known.expect(key, request.keys(naming))
            row.place(decision.to_compute, now, request.tenant)

    # --- what engines have of a prompt --------------------------------------------------------

    def _remembered(self, request: RequestView) -> _Remembered:
        if request.keys is None or not self.known.index.num_known:
            return _Remembered({role: np.zeros(len(t.rows)) for role, t in self.tables.items()})
        if request.adapter:
            tables = self.tables.items()
            cached = {role: self._cached_by_adapter(t, request) for role, t in tables}
            stored: Tokens = {}
            if self.known.index.only_stored.num_blocks:
                for role, table in tables:
                    with_disk = self._cached_by_adapter(table, request, stored=True)
                    stored[role] = with_disk - cached[role]
            return _Remembered(cached, stored=stored)
        tokens: dict[float, Floats] = {}
        tokens_with_disk: dict[float, Floats] = {}
        held: list[Leading] = []
        tie = None
        places = self.known.num_places
        prefill, decode = self.tables.values()
        for size in {*prefill.eligibility.block_sizes, *decode.eligibility.block_sizes}:
            keys = request.keys(BlockNaming(int(size)))
            match = self.known.index.match(keys)
            tokens[size] = lengths(match.soon, places) * np.float64(size)
            if match.stored is not match.soon:
                tokens_with_disk[size] = lengths(match.stored, places) * np.float64(size)
            for blocks, engines in match.now:
                held.append((blocks * int(size), engines))
            longest = match.stored[-1][0] if match.stored else 0
            if longest < len(keys):
                tie = int(keys[longest])
        cached = {"prefill": _tokens(prefill, tokens), "decode": _tokens(decode, tokens)}
        if not tokens_with_disk:
            return _Remembered(cached, held, tie)
        all_ = tokens | tokens_with_disk
        stored = {role: _tokens(t, all_) - cached[role] for role, t in self.tables.items()}
        return _Remembered(cached, held, tie, stored)

    def _cached_by_adapter(
        self, table: EngineTable, request: RequestView, *, stored: bool = False
    ) -> Floats:
        """Engines may have other files under the same name, and most do not have it loaded."""
        cached: Floats = np.zeros(len(table))
        for at, row in enumerate(table.rows):
            naming = self._naming(request, row.key, table.column["block_size"][at])
            if naming is not None and request.keys is not None:
                blocks = self.known.num_cached(row.key, request.keys(naming), stored=stored)
                cached[at] = blocks * naming.block_size
        return cached

    def _elsewhere(self, cached: Tokens, held: Sequence[Leading]) -> Tokens:
        """How many tokens of the prompt each engine has, or could fetch from another one."""
        found = dict(cached)
        kinds = self._lenders() if held else {}
        for kind, lenders in kinds.items():
            most = max((tokens for tokens, engines in held if engines & lenders), default=0)
            if not most:
                continue
            for role, table in self.tables.items():
                more = np.maximum(found[role], most)
                if len(kinds) > 1:
                    more = np.where(table.column["fingerprint"] == kind, more, found[role])
                found[role] = more
        return found

    def _lenders(self) -> dict[float, int]:
        """See `Eligibility.lends`, of both tables."""
        first, second = (table.eligibility.lends for table in self.tables.values())
        return {kind: first.get(kind, 0) | second.get(kind, 0) for kind in first | second}

    def _naming(self, request: RequestView, key: str, block_size: float) -> BlockNaming | None:
        """How an engine names the blocks of a prompt; None: that is not known."""
        digest = self.known.adapters(key).get(request.adapter) if request.adapter else ""
        return None if digest is None else BlockNaming(int(block_size), digest)


def _adapter_s(table: EngineTable, name: str, now: float) -> Floats:
    """[engines] Seconds to load the adapter of this name; 0 where it is loaded."""
    lacking = np.array([not row.adapters.has(name, now) for row in table.rows], np.float64)
    seconds: Floats = lacking * table.column["adapter_s"]
    return seconds


def _barred(table: EngineTable, lively: bool, left_out: Sequence[EngineRow]) -> Floats:
    """[engines] 0 for those that may get requests, infinity for the others and for those of
    `left_out`. lively: those that may hang are left out too."""
    barred = table.eligibility.barred_or_silent if lively else table.eligibility.barred
    if left_out:
        barred = barred.copy()
        barred[[row.at for row in left_out if row.table is table]] = TOO_MUCH
    return barred


def _tokens(table: EngineTable, tokens: Mapping[float, Floats]) -> Floats:
    """[engines] What each has; tokens: by block size, [places]."""
    sizes = table.eligibility.block_sizes
    if len(sizes) == 1:
        return tokens[sizes[0]].take(table.places)
    found = np.zeros(len(table))
    for size in sizes:
        among = table.column["block_size"] == size
        found[among] = tokens[size][table.places[among]]
    return found
