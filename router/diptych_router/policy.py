"""Which engines serve a request: filter, score, pick. Pure.

`choose` drops the engines that cannot take the request, has a `Policy` score the others, and picks
the pair with the lowest sum among those that fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from diptych_router.prefixes.block_keys import BlockNaming
from diptych_router.prefixes.hash_table import Keys

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class EngineView:
    """What a policy may know of an engine."""

    key: str
    fingerprint: str
    """Engines exchange KV only if these are equal."""
    load: int
    """Tokens of work that this router has open there."""
    usable: bool = True
    """It may get new requests."""
    cached: int = 0
    """Tokens of the request's prompt, from the first one on, whose KV it has."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of a request."""

    prompt_tokens: int = 0
    prefix: int | None = None
    """The number of the prefix that its prompt shares with others; None: not known."""
    prefill_only: bool = False
    """It ends with its prefill."""
    keys: Callable[[BlockNaming], Keys] | None = None
    """The keys of its prompt's full blocks; None: what they depend on is not known."""
    adapter: str = ""
    """Name of the adapter that it wants."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Both pools at one moment."""

    prefill: Sequence[EngineView]
    decode: Sequence[EngineView]


class Policy(Protocol):
    """How well engines suit a request."""

    @property
    def reason(self) -> str:
        """What distinguishes the chosen engines, in words, for logs."""

    def scores(
        self, request: RequestView, role: Role, engines: Sequence[EngineView]
    ) -> Sequence[float]:
        """One number for each engine of a pool, in their order: the lowest is the best. A pair has
        the sum of its two. Engines that cannot be chosen are among them."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Prefill at `prefill` and decode at `decode`; None: the decode engine does both.

    A request that ends with its prefill has the same engine twice.
    """

    prefill: str | None
    decode: str
    reason: str
    fetch: str | None = None
    """The engine from which the one that computes the prompt is to fetch what it lacks of the
    prefix, where that is faster than to compute it; None: it computes all that it lacks."""
    fetch_tokens: int = 0
    """How many tokens, from the first one on, that engine is thought to have."""


Scored = tuple[float, EngineView]


def choose(
    policy: Policy, request: RequestView, fleet: Snapshot, full: Collection[str] = ()
) -> Decision | None:
    """The engines for a new attempt; None: there are none now.

    full: keys of engines that have no room. Where prefill has none, decode engines do not compute
        the prompt in its stead: that would make all streams slow.
    """
    prefill = _scored(policy, request, "prefill", fleet.prefill, full)
    decode = _scored(policy, request, "decode", fleet.decode, full)
    if request.prefill_only:
        decision = _pick_one(policy, prefill, decode)
    else:
        decision = _pick_pair(policy, prefill, decode)
    prefill_is_full = any(view.key in full for view in fleet.prefill)
    if decision is not None and decision.prefill is None and prefill_is_full:
        return None
    return decision


def successor(policy: Policy, decode: Sequence[EngineView], fingerprint: str) -> EngineView | None:
    """The decode engine that should take over KV of this fingerprint; None: no usable one fits."""
    fitting = _best_of_each(_scored(policy, RequestView(), "decode", decode)).get(fingerprint)
    return None if fitting is None else fitting[1]


def _scored(
    policy: Policy,
    request: RequestView,
    role: Role,
    engines: Sequence[EngineView],
    full: Collection[str] = (),
) -> list[Scored]:
    """The engines that may take the request, with their scores."""
    scores = policy.scores(request, role, engines)
    return [
        (score, engine)
        for score, engine in zip(scores, engines, strict=True)
        if engine.usable and engine.key not in full
    ]


def _pick_pair(
    policy: Policy, prefill: Sequence[Scored], decode: Sequence[Scored]
) -> Decision | None:
    """The pair with the lowest sum of scores, among the engines that fit together.

    Fingerprints (the revisions of a rollout) compete by their best pairs, so each gets requests in
    proportion to what it can carry; one without a partner gets none of them while any pair exists.
    Without any pair, the best decode engine computes the prompt itself.
    """
    best_prefill, best_decode = _best_of_each(prefill), _best_of_each(decode)
    if not best_decode:
        return None
    pairs = [
        (best_prefill[fingerprint], second)
        for fingerprint, second in best_decode.items()
        if fingerprint in best_prefill
    ]
    if not pairs:
        _, alone = min(best_decode.values(), key=_score)
        reason = "no usable prefill engine" if not best_prefill else "no prefill engine fits"
        return Decision(None, alone.key, f"{reason}: prompt computed by the decode engine")
    (_, first), (_, second) = min(pairs, key=lambda pair: _score(pair[0]) + _score(pair[1]))
    return Decision(first.key, second.key, f"{policy.reason} pair")


def _pick_one(
    policy: Policy, prefill: Sequence[Scored], decode: Sequence[Scored]
) -> Decision | None:
    """The engine for a request that is nothing but a prefill: one of the prefill pool, or else of
    the decode pool."""
    if prefill:
        key = min(prefill, key=_score)[1].key
        return Decision(key, key, f"{policy.reason} prefill engine")
    if decode:
        key = min(decode, key=_score)[1].key
        return Decision(None, key, "no usable prefill engine: prompt computed by a decode engine")
    return None


def _best_of_each(engines: Sequence[Scored]) -> Mapping[str, Scored]:
    """By fingerprint, in the order of the first engine of each; the first of equals."""
    best: dict[str, Scored] = {}
    for scored in engines:
        known = best.setdefault(scored[1].fingerprint, scored)
        if scored[0] < known[0]:
            best[scored[1].fingerprint] = scored
    return best


def _score(scored: Scored) -> float:
    return scored[0]
