"""Chooses the engines for a request: filter, cost, pick. It performs no I/O.

A `Policy` says what each engine would cost a request. `choose` leaves out the engines that cannot
take it, and picks the cheapest pair that fits together, or one decode engine that does everything.
Among engines of the same cost, different prompts prefer different ones, and all routers agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add
from types import MappingProxyType
from typing import Final, Literal, Protocol

import numpy as np

from diptych_protocol.router_settings import Disaggregate
from diptych_router.engines.block_holders import Keys
from diptych_router.engines.engine_table import EngineTable, Flags, Floats
from diptych_router.engines.known_prefixes import BlockNaming
from diptych_router.engines.pair_rates import WORDS, Nearnesses, Pairing, PairRates, Ways

Duty = Literal["prefill", "decode", "both"]
"""The task of an engine: to compute a prompt for another, to continue after that, or to do both."""
Terms = Mapping[str, Floats]
"""The cost of each engine, by the name of the reason; the total is the sum of all terms."""
Draw = Callable[[int], int]
"""Draws a number from 0 to below another one."""
TOO_MUCH: Final = np.inf
EXACTLY: Final[Mapping[Duty, float]] = MappingProxyType({})
"""For policies by which only equal costs are equal: see `Policy.equal_within`."""
ARRAYS: Final = 4
ARRAY_BYTES: Final = 128
"""The number of arrays of `Priced` beside its terms, and the overhead of one array in bytes."""
FETCH: Final = "fetch_s"
"""A term of policies that know when an engine should fetch the missing part of a prefix from the
engine that has most of it; above 0 where it should."""
READ: Final = "read_s"
"""The same of what disks cost; above 0 where an engine should read what it has on disk."""
TRANSFER: Final = "transfer_s"
"""A term of policies that know how long a hand-off takes with an average sender. For a pair it
becomes the time of this pair."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of a request."""

    prompt_tokens: int = 0
    output_tokens: float = 0.0
    """How many tokens it is expected to generate."""
    prefill_only: bool = False
    goes_on: bool = False
    """Part of its answer has been generated."""
    keys: Callable[[BlockNaming], Keys] | None = None
    """The keys of its prompt's full blocks; None if they cannot be known."""
    adapter: str = ""
    tenant: str = ""
    disaggregate: Disaggregate | None = None
    """Overrides the router's setting."""
    revisions: tuple[str, ...] = ()
    """The revisions whose engines may take it; empty: all."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool as a policy sees it for one request. All arrays are [engines]."""

    table: EngineTable
    barred: Floats
    """0 for engines that can take it, infinity for the others."""
    cached: Floats
    """Tokens of its prompt, from the first one on, whose KV each has in memory."""
    lacking: Floats
    """Tokens of its prompt whose KV each lacks."""
    elsewhere: Floats
    """The same of the engine that has most of it, among those that each could fetch it from."""
    now: float = 0.0
    adapter_s: Floats | None = None
    """Seconds that each needs to load the request's adapter; None if it has none."""
    tie: int | None = None
    """Decides between engines of the same cost: see `EngineTable.preferred`. None: draw one."""
    beside_s: Floats | None = None
    """Seconds for which others on its processors compute prompts, each times the part of them that
    it uses; None if no engine shares any."""
    stored: Floats | None = None
    """The tokens after `cached` whose KV each has on disk only; None if no engine has any."""
    made: dict[str, Terms] = field(default_factory=dict)
    """Terms that a policy has computed for one duty, and needs for another one."""


class Policy(Protocol):
    """Computes what engines cost a request."""

    reason: str
    """What distinguishes the chosen engines, in words, for logs."""
    compares_duties: bool
    """Whether the cost of one engine that does everything can be compared with that of a pair."""
    reads_prefixes: bool
    """It looks at `PoolView.cached`, so engines are asked to report what they remember."""
    equal_within: Mapping[Duty, float]
    """Engines that cost at most this share more than the cheapest one count as equal, by their
    duty; 0 for a duty that is not named. For decode it is that of each router."""

    def costs(self, request: RequestView, duty: Duty, engines: PoolView) -> Terms:
        """Return the cost of each engine, also of those that cannot be chosen. A pair costs the sum
        of its two. The arrays are kept, so none may be a column of the table, which changes."""


class Priced:
    """One pool with the cost of each engine for one duty."""

    def __init__(
        self, policy: Policy, request: RequestView, draw: Draw, duty: Duty, engines: PoolView
    ) -> None:
        self.engines, self.duty = engines, duty
        self.rows = engines.table.rows
        """[engines] Also later, when other engines are in the table."""
        self._draw = draw
        self._equal_within = policy.equal_within.get(duty, 0.0)
        if duty == "decode":
            # Of what the others have sent since its last report, no router knows. They would all
            # choose the same few engines, whose links are then busy for seconds.
            self._equal_within *= engines.table.share.count
        self._prompt_tokens = request.prompt_tokens
        self._terms = policy.costs(request, duty, engines)
        self._total = reduce(add, self._terms.values(), engines.barred)
        self._near: Nearnesses | None = None

    def best(self, among: Flags | None = None, pairing: Pairing | None = None) -> int | None:
        """Return the cheapest engine of all or of some; one of them if several are.

        pairing: with an engine of the other pool. Among equal ones, the nearest to it count, and
        of these the router's homes (`RouterShare`).
        """
        total = self._total if pairing is None else self._total + pairing.extra
        if among is not None:
            total = np.where(among, total, TOO_MUCH)
        if not len(total):
            return None
        at = int(total.argmin())
        cost = total[at]
        if cost == TOO_MUCH:
            return None
        # With a sender that is faster than usual it may be negative.
        alike = total <= cost + abs(cost) * self._equal_within
        for moved in (self._terms.get(FETCH), self._terms.get(READ)):
            if moved is not None and not moved[at]:
                alike &= moved == 0  # nothing is fetched or read for the sake of a draw
        equal = alike.nonzero()[0]
        if pairing is not None and len(equal) > 1:
            near = pairing.near[equal]
            equal = equal[near == near.min()]
        if len(equal) > 1:
            home = self.engines.table.column["home"][equal] > 0
            equal = equal[home] if home.any() else equal
        if len(equal) == 1:
            return int(equal[0])
        if self.engines.tie is None:
            return int(equal[self._draw(len(equal))])
        return self.engines.table.preferred(equal, self.engines.tie)

    @property
    def lacking(self) -> Floats | None:
        """[engines] Tokens whose KV a hand-off brings; None if the policy ignores that time."""
        return self.engines.lacking if TRANSFER in self._terms else None

    def settle(self, pairing: Pairing) -> None:
        """Fix the other engine of the pair: from now on costs include it."""
        self._terms = {**self._terms, TRANSFER: self._terms[TRANSFER] + pairing.extra}
        self._total = self._total + pairing.extra
        self._near = pairing.near.copy()

    def near(self, at: int) -> str:
        """Return how near an engine is to the other one of the pair, in words; empty if unknown."""
        return "" if self._near is None else WORDS[self._near[at]]

    @property
    def num_able(self) -> int:
        """The number of engines that could have been chosen."""
        return int((self._total != TOO_MUCH).sum())

    @property
    def num_bytes(self) -> int:
        """The approximate memory that it takes."""
        near = 0 if self._near is None else self._near.nbytes + ARRAY_BYTES
        return (len(self._terms) + ARRAYS) * (self._total.nbytes + ARRAY_BYTES) + near

    def cost(self, at: int) -> float:
        return float(self._total[at])

    def cheapest(self, most: int) -> list[int]:
        """Return the engines that can take the request, the cheapest first."""
        order = self._total.argsort()[:most].tolist()
        return [at for at in order if self._total[at] != TOO_MUCH]

    def terms(self, at: int) -> dict[str, float]:
        terms = {}
        for name, values in self._terms.items():
            terms[name] = float(values[at])
        return terms

    def fetches(self, at: int) -> int:
        """Return how many of the prompt's first tokens this engine should get from another one."""
        wanted = self._terms.get(FETCH)
        return int(self.engines.elsewhere[at]) if wanted is not None and wanted[at] > 0 else 0

    def stored(self, at: int) -> int:
        """Return how many tokens of the prompt it has on disk only."""
        return 0 if self.engines.stored is None else int(self.engines.stored[at])

    def leaves_disk(self, at: int) -> bool:
        """Whether it should compute what it has on disk."""
        read = self._terms.get(READ)
        return read is not None and not read[at] and self.stored(at) > 0

    def to_compute(self, at: int, fetched: int) -> float:
        """Return how many tokens it would neither have, read nor fetch: at least the last one."""
        read = self._terms.get(READ)
        here = int(self.engines.cached[at])
        if read is not None and read[at]:
            here += self.stored(at)
        return max(1.0, self._prompt_tokens - float(max(here, fetched)))


_Price = Callable[[Duty, PoolView], Priced]
_Picked = tuple[Priced, int]
"""An engine of some, by its place."""
_Places = tuple[int, int, float]
"""A pair by the places of its engines, and what it costs more than both."""
ALONE: Final = "prompt computed by the decode engine"


@dataclass(frozen=True, slots=True)
class Decision:
    """Prefill at `prefill` and decode at `decode`; None: the decode engine does both. A request
    that ends with its prefill has the same engine twice."""

    prefill: str | None
    decode: str
    reason: str
    fetch: str | None = None
    """The engine from which the one that computes the prompt should fetch the missing part of the
    prefix, if that is faster than computing it; None if it is not."""
    fetch_tokens: int = 0
    """How many tokens, from the first one on, that engine probably has."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """The costs of the choice, by the name of the reason."""
    to_compute: float = 0.0
    """Tokens of the prompt that the engine that computes it neither has nor fetches."""
    leaves_disk: bool = False
    """That engine should compute what it has on disk only."""
    weighed: list[Priced] = field(default_factory=list, repr=False, compare=False)
    """All candidates with their costs, until they are forgotten."""


def choose(
    policy: Policy,
    request: RequestView,
    prefill: PoolView,
    decode: PoolView,
    draw: Draw,
    disaggregate: Disaggregate,
    pairs: PairRates,
) -> Decision | None:
    """Return the engines for a new attempt; None if there are none now.

    disaggregate: whether a pair is chosen if there is one. auto: if it costs less than the decode
    engine alone, as far as the policy can tell; always; never.
    """
    price = partial(Priced, policy, request, draw)
    if request.prefill_only:
        return _pick_one(policy, price, prefill, decode)
    pair = None
    if disaggregate != "never":
        pair = _pick_pair(price, prefill, decode, pairs)
        if pair is not None and (disaggregate == "always" or not policy.compares_duties):
            return _pair(policy, pair)
    alone = price("both", decode)
    at = alone.best()
    if pair is None:
        why = _why_alone(prefill, disaggregate)
        return None if at is None else _one(alone, at, f"{why}: {ALONE}", [alone])
    (first, p), (second, d) = pair
    weighed = [first, second, alone]
    if at is None or first.cost(p) + second.cost(d) <= alone.cost(at):
        return _pair(policy, pair, weighed)
    return _one(alone, at, f"cheaper than a hand-off: {ALONE}", weighed)


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    both = {**one, **other}
    for name in one:
        if name in other:
            both[name] = one[name] + other[name]
    return both


def _pick_pair(
    price: _Price, prefill: PoolView, decode: PoolView, pairs: PairRates
) -> tuple[_Picked, _Picked] | None:
    """The cheapest pair among the engines that fit together."""
    if not prefill.table.rows:
        return None
    first, second = price("prefill", prefill), price("decode", decode)
    ways = None
    if (pairs.learned or pairs.placed) and (lacking := second.lacking) is not None:
        ways = pairs.ways(lacking, decode.table.column["trip_token_s"])
    best = _best_pair(first, second, ways)
    if best is None:
        return None
    p, d, _ = best
    if ways is not None:
        second.settle(ways.from_sender(p))
    return (first, p), (second, d)


def _pair(
    policy: Policy, pair: tuple[_Picked, _Picked], weighed: list[Priced] | None = None
) -> Decision:
    (first, p), (second, d) = pair
    fetched = first.fetches(p)
    return Decision(
        first.rows[p].key,
        second.rows[d].key,
        f"{policy.reason} pair",
        fetch_tokens=fetched,
        terms=_added(first.terms(p), second.terms(d)),
        to_compute=first.to_compute(p, fetched),
        leaves_disk=first.leaves_disk(p),
        weighed=weighed or [first, second],
    )


def _best_pair(first: Priced, second: Priced, ways: Ways | None) -> _Places | None:
    """The cheapest pair.

    Fingerprints (the revisions of a rollout) compete by their best pairs, so each gets requests in
    proportion to what it can carry; one without a partner gets none of them while any pair exists.
    """
    ours = first.engines.table.column["fingerprint"]
    theirs = second.engines.table.column["fingerprint"]
    kinds = second.engines.table.eligibility.fingerprints
    if len(kinds) == 1 and first.engines.table.eligibility.fingerprints == kinds:
        return _best_among(first, second, ways)
    found = [_best_among(first, second, ways, ours == kind, theirs == kind) for kind in kinds]
    pairs = [pair for pair in found if pair is not None]
    return min(pairs, key=partial(_cost_of, first, second), default=None)


def _cost_of(first: Priced, second: Priced, pair: _Places) -> float:
    return first.cost(pair[0]) + second.cost(pair[1]) + pair[2]


def _best_among(
    first: Priced,
    second: Priced,
    ways: Ways | None,
    ours: Flags | None = None,
    theirs: Flags | None = None,
) -> _Places | None:
    """The cheapest pair of these engines, as far as can be seen from both sides: the best partner
    of the cheapest engine that computes, or that of the cheapest one that decodes. To look at all
    pairs would take too long."""
    p = first.best(ours)
    if ways is None or p is None:
        d = None if p is None else second.best(theirs)
        return None if p is None or d is None else (p, d, 0.0)
    onward = ways.from_sender(p)
    d = second.best(theirs, onward)
    if d is None:
        return None
    found = p, d, float(onward.extra[d])
    if ways.token_s is None:
        return found
    d = second.best(theirs)
    back = None if d is None else ways.to_receiver(d)
    p = first.best(ours, back)
    if d is None or p is None or back is None:
        return found
    other = p, d, float(back.extra[p])
    return min(found, other, key=partial(_cost_of, first, second))


def _why_alone(prefill: PoolView, disaggregate: Disaggregate) -> str:
    if disaggregate == "never":
        return "never disaggregated"
    return "no prefill engine fits" if (prefill.barred == 0).any() else "no usable prefill engine"


def _pick_one(
    policy: Policy, price: _Price, prefill: PoolView, decode: PoolView
) -> Decision | None:
    """The engine of a request that is only a prefill: of the prefill pool, else of the other."""
    first = price("prefill", prefill)
    at = first.best()
    if at is not None:
        reason = f"{policy.reason} prefill engine"
        return _one(first, at, reason, [first], of_prefill=True)
    second = price("prefill", decode)
    at = second.best()
    reason = "no usable prefill engine: prompt computed by a decode engine"
    return None if at is None else _one(second, at, reason, [second])


def _one(
    priced: Priced, at: int, reason: str, weighed: list[Priced], *, of_prefill: bool = False
) -> Decision:
    """One engine does all that is to be done."""
    key, fetched = priced.rows[at].key, priced.fetches(at)
    return Decision(
        key if of_prefill else None,
        key,
        reason,
        fetch_tokens=fetched,
        terms=priced.terms(at),
        to_compute=priced.to_compute(at, fetched),
        leaves_disk=priced.leaves_disk(at),
        weighed=weighed,
    )
