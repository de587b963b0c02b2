"""Which engines serve a request: filter, cost, pick. Pure.

A `Policy` says what each engine would cost a request. `choose` leaves out the engines that cannot
take it, and picks the cheapest pair that fits together, or one decode engine that does everything.
Equal costs are decided at draw, so that several routers do not all take the same engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

import numpy as np

from diptych_protocol.config import Disaggregate
from diptych_router.engine_table import EngineTable, Flags, Floats, distinct
from diptych_router.prefixes.block_keys import BlockNaming
from diptych_router.prefixes.hash_table import Keys

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")
Duty = Literal["prefill", "decode", "both"]
"""What an engine would do for a request: compute its prompt for another, go on after that, or
everything."""
Terms = Mapping[str, Floats]
"""What each engine would cost, by the name of the reason; the cost is the sum of all terms."""
Draw = Callable[[int], int]
"""A number from 0 to below another one, at random."""
TOO_MUCH: Final = np.inf


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of a request."""

    prompt_tokens: int = 0
    output_tokens: float = 0.0
    """How many tokens it is expected to generate."""
    prefill_only: bool = False
    """It ends with its prefill."""
    keys: Callable[[BlockNaming], Keys] | None = None
    """The keys of its prompt's full blocks; None: what they depend on is not known."""
    adapter: str = ""
    """Name of the adapter that it wants."""


@dataclass(frozen=True, slots=True)
class Engines:
    """One pool as a policy sees it for one request. All arrays are [engines]."""

    table: EngineTable
    usable: Flags
    """Who can take it."""
    cached: Floats
    """Tokens of its prompt, from the first one on, whose KV each has."""
    now: float = 0.0

    def column(self, name: str) -> Floats:
        """See `engine_table.FIELDS`."""
        return self.table.column(name)

    def key(self, at: int) -> str:
        return self.table.rows[at].key


class Policy(Protocol):
    """What engines cost a request."""

    @property
    def reason(self) -> str:
        """What distinguishes the chosen engines, in words, for logs."""

    @property
    def compares_duties(self) -> bool:
        """The cost of one engine that does everything can be compared with that of a pair."""

    def costs(self, request: RequestView, duty: Duty, engines: Engines) -> Terms:
        """What each engine of a pool would cost for this duty. A pair costs the sum of its two.
        Engines that cannot be chosen are among them."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Prefill at `prefill` and decode at `decode`; None: the decode engine does both.

    A request that ends with its prefill has the same engine twice.
    """

    prefill: str | None
    decode: str
    reason: str
    terms: Mapping[str, float] = field(default_factory=dict)
    """What the choice costs, by the name of the reason."""
    to_compute: float = 0.0
    """Tokens of the prompt that the engine that computes it does not have."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """One engine of a pool, and its cost."""

    at: int
    cost: float


class _Priced:
    """A pool with the costs of one duty."""

    def __init__(
        self,
        policy: Policy,
        request: RequestView,
        duty: Duty,
        engines: Engines,
        draw: Draw,
    ) -> None:
        self.engines, self._draw = engines, draw
        self._terms = policy.costs(request, duty, engines)
        self._total = np.where(engines.usable, sum(self._terms.values()), TOO_MUCH)

    def best(self, among: Flags | None = None) -> _Choice | None:
        """The cheapest engine of all or of some; one of them at draw, if several are."""
        total = self._total if among is None else np.where(among, self._total, TOO_MUCH)
        cost = float(total.min(initial=TOO_MUCH))
        if cost == TOO_MUCH:
            return None
        equal = (total == cost).nonzero()[0]
        at = self._draw(len(equal)) if len(equal) > 1 else 0
        return _Choice(int(equal[at]), cost)

    def terms(self, at: int) -> dict[str, float]:
        return {name: float(values[at]) for name, values in self._terms.items()}


def choose(
    policy: Policy,
    request: RequestView,
    prefill: Engines,
    decode: Engines,
    draw: Draw,
    disaggregate: Disaggregate = "auto",
) -> Decision | None:
    """The engines for a new attempt; None: there are none now.

    disaggregate: whether a pair is chosen if there is one. auto: if it costs less than the decode
        engine alone, as far as the policy can tell; always; never.
    """
    if request.prefill_only:
        return _pick_one(policy, request, prefill, decode, draw)
    pair = None
    if disaggregate != "never":
        pair = _pick_pair(policy, request, prefill, decode, draw)
        if pair is not None and (disaggregate == "always" or not policy.compares_duties):
            return pair
    why = "cheaper than a hand-off" if pair is not None else _why_alone(prefill, disaggregate)
    alone = _alone(policy, request, decode, draw, why)
    if pair is None or alone is None:
        return pair or alone
    return pair if sum(pair.terms.values()) <= sum(alone.terms.values()) else alone


def successor(policy: Policy, decode: Engines, fingerprint: float, draw: Draw) -> str | None:
    """The decode engine that should take over KV of this fingerprint; None: no usable one fits."""
    priced = _Priced(policy, RequestView(), "decode", decode, draw)
    chosen = priced.best(decode.column("fingerprint") == fingerprint)
    return None if chosen is None else decode.key(chosen.at)


def _pick_pair(
    policy: Policy,
    request: RequestView,
    prefill: Engines,
    decode: Engines,
    draw: Draw,
) -> Decision | None:
    """The cheapest pair among the engines that fit together.

    Fingerprints (the revisions of a rollout) compete by their best pairs, so each gets requests in
    proportion to what it can carry; one without a partner gets none of them while any pair exists.
    """
    if not (prefill.usable.any() and decode.usable.any()):
        return None
    first = _Priced(policy, request, "prefill", prefill, draw)
    second = _Priced(policy, request, "decode", decode, draw)
    ours, theirs = prefill.column("fingerprint"), decode.column("fingerprint")
    best: tuple[float, int, int] | None = None
    for fingerprint in distinct(theirs[decode.usable]):
        one, two = first.best(ours == fingerprint), second.best(theirs == fingerprint)
        if one is None or two is None:
            continue
        if best is None or one.cost + two.cost < best[0]:
            best = one.cost + two.cost, one.at, two.at
    if best is None:
        return None
    _, p, d = best
    return Decision(
        prefill.key(p),
        decode.key(d),
        f"{policy.reason} pair",
        first.terms(p) | second.terms(d),
        max(1.0, request.prompt_tokens - float(prefill.cached[p])),
    )


def _alone(
    policy: Policy, request: RequestView, decode: Engines, draw: Draw, why: str
) -> Decision | None:
    """The best decode engine computes the prompt itself."""
    priced = _Priced(policy, request, "both", decode, draw)
    chosen = priced.best()
    if chosen is None:
        return None
    to_compute = max(1.0, request.prompt_tokens - float(decode.cached[chosen.at]))
    reason = f"{why}: prompt computed by the decode engine"
    return Decision(None, decode.key(chosen.at), reason, priced.terms(chosen.at), to_compute)


def _why_alone(prefill: Engines, disaggregate: Disaggregate) -> str:
    if disaggregate == "never":
        return "never disaggregated"
    return "no prefill engine fits" if prefill.usable.any() else "no usable prefill engine"


def _pick_one(
    policy: Policy,
    request: RequestView,
    prefill: Engines,
    decode: Engines,
    draw: Draw,
) -> Decision | None:
    """The engine for a request that is nothing but a prefill: one of the prefill pool, or else of
    the decode pool."""
    for engines, of_prefill in ((prefill, True), (decode, False)):
        priced = _Priced(policy, request, "prefill", engines, draw)
        chosen = priced.best()
        if chosen is None:
            continue
        key = engines.key(chosen.at)
        reason = "no usable prefill engine: prompt computed by a decode engine"
        if of_prefill:
            reason = f"{policy.reason} prefill engine"
        to_compute = max(1.0, request.prompt_tokens - float(engines.cached[chosen.at]))
        terms = priced.terms(chosen.at)
        return Decision(key if of_prefill else None, key, reason, terms, to_compute)
    return None
