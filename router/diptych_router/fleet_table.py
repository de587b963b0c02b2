"""All that a router knows of both pools, and the decisions that follow from it. Pure.

`Pools` keeps it up to date from its lines to the engines, and the simulator from its pods.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from diptych_protocol.config import Disaggregate
from diptych_protocol.wire import PrefixChanges
from diptych_router.engine_table import EngineRow, EngineTable, Flags, FleetRates, Floats, distinct
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

ANY_REQUEST = RequestView()
Lengths = dict[float, NDArray[np.int32]]
"""Block size -> `KnownPrefixes.lengths` of a request."""


class FleetTable:
    """Two tables of engines, and what the engines remember."""

    def __init__(self, policy: Policy, draw: Draw, disaggregate: Disaggregate = "auto") -> None:
        """draw: decides between engines of the same cost."""
        rates = FleetRates()
        self.tables: dict[Role, EngineTable] = {
            "prefill": EngineTable(rates),
            "decode": EngineTable(rates),
        }
        self.known = KnownPrefixes()
        self._policy, self._draw, self._disaggregate = policy, draw, disaggregate
        self._rows: dict[str, tuple[Role, EngineRow]] = {}
        self._fingerprints: dict[str, float] = {}

    # --- who is there -------------------------------------------------------------------------

    def add(self, role: Role, key: str) -> EngineRow:
        """A new engine, not usable yet."""
        row = self.tables[role].add(key)
        self._rows[key] = role, row
        row["place"] = self.known.place(key)
        return row

    def remove(self, key: str) -> None:
        role, row = self._rows.pop(key)
        self.tables[role].remove(row)
        self.known.forget(key)

    def is_up(self, row: EngineRow, fingerprint: str) -> None:
        """Another process answers, which fits together with those of the same fingerprint."""
        number = self._fingerprints.setdefault(fingerprint, float(len(self._fingerprints)))
        row["fingerprint"] = number
        self.known.restarted(row.key)

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
        lengths: Lengths = {}
        for lively in (True, False):
            prefill, decode = (
                self._engines(role, request, now, lively, lengths) for role in self.tables
            )
            for role, row in full_at:
                (prefill if role == "prefill" else decode).usable[row.at] = False
            decision = choose(self._policy, request, prefill, decode, self._draw, how)
            if decision is not None:
                break
        if (
            decision is not None
            and decision.prefill is None
            and how != "never"
            and any(role == "prefill" for role, _ in full_at)
        ):
            return None
        return decision

    def successor(self, fingerprint: str, usable: Collection[str], now: float) -> str | None:
        """The decode engine, of some usable ones, that should take over KV of this fingerprint."""
        table = self.tables["decode"]
        fit: Flags = np.zeros(len(table), np.bool_)
        for key in usable:
            fit[self._rows[key][1].at] = True
        number = self._fingerprints.get(fingerprint, -1.0)
        engines = Engines(table, fit, np.zeros(len(table)), now)
        return successor(self._policy, engines, number, self._draw)

    def placed(self, request: RequestView, decision: Decision) -> None:
        """A request goes to these engines, which will have the KV of its prompt."""
        computes = decision.prefill or decision.decode
        for key in {decision.prefill, decision.decode} - {None}:
            known = self._rows.get(str(key))
            if known is None:
                continue
            _, row = known
            row["given"] += 1
            if key == computes:
                row.place(decision.to_compute)
            naming = self._naming(request, row)
            if request.keys is None or naming is None:
                continue
            keys = request.keys(naming)
            if len(keys):
                self.known.expect(row.key, keys)

    # --- what engines have of a prompt --------------------------------------------------------

    def _engines(
        self, role: Role, request: RequestView, now: float, lively: bool, lengths: Lengths
    ) -> Engines:
        table = self.tables[role]
        usable: Flags = table.column("usable") > 0
        if lively:
            usable &= table.column("silent") == 0
        return Engines(table, usable, self._cached(table, request, lengths), now)

    def _cached(self, table: EngineTable, request: RequestView, lengths: Lengths) -> Floats:
        """[engines] Tokens of its prompt that each has. lengths: those found already."""
        if request.keys is None or not self.known.num_known or not len(table):
            return np.zeros(len(table))
        if request.adapter:
            return self._cached_by_adapter(table, request)
        sizes, places = table.column("block_size"), table.column("place").astype(np.intp)
        cached: Floats = np.zeros(len(table))
        for size in distinct(sizes):
            keys = request.keys(BlockNaming(int(size)))
            if not len(keys):
                continue
            if size not in lengths:
                lengths[size] = self.known.lengths(keys)
            cached = np.where(sizes == size, lengths[size][places] * size, cached)
        return cached

    def _cached_by_adapter(self, table: EngineTable, request: RequestView) -> Floats:
        """Engines may have other files under the same name, and most do not have it loaded."""
        cached: Floats = np.zeros(len(table))
        for at, row in enumerate(table.rows):
            naming = self._naming(request, row)
            if naming is not None and request.keys is not None:
                found = self.known.num_cached([row.key], request.keys(naming))
                cached[at] = found[row.key] * naming.block_size
        return cached

    def _naming(self, request: RequestView, row: EngineRow) -> BlockNaming | None:
        """How an engine names the blocks of a prompt; None: that is not known."""
        digest = self.known.adapters(row.key).get(request.adapter) if request.adapter else ""
        return None if digest is None else BlockNaming(int(row["block_size"]), digest)
