"""Which engines serve a request. Pure: a view of the pools in, a decision and its reason out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class EngineView:
    """What the policy may know of an engine."""

    key: str
    fingerprint: str
    """Engines exchange KV only if these are equal."""
    load: int
    """Tokens of work that this router has open there."""
    usable: bool = True
    """It may get new requests."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Prefill at `prefill` and decode at `decode`; None: the decode engine does both.

    A request that ends with its prefill has the same engine twice.
    """

    prefill: str | None
    decode: str
    reason: str


def choose(
    prefill: Sequence[EngineView],
    decode: Sequence[EngineView],
    full: Collection[str] = (),
    *,
    prefill_only: bool = False,
) -> Decision | None:
    """The engines for a new attempt; None: there are none now.

    prefill_only: the request ends with its prefill.
    full: keys of engines that have no room. Where prefill has none, decode engines do not compute
        the prompt in its stead: that would make all streams slow.
    """
    decision = (decide_prefill if prefill_only else decide)(
        [view for view in prefill if view.key not in full],
        [view for view in decode if view.key not in full],
    )
    prefill_is_full = any(view.key in full for view in prefill)
    if decision is not None and decision.prefill is None and prefill_is_full:
        return None
    return decision


def decide(prefill: Sequence[EngineView], decode: Sequence[EngineView]) -> Decision | None:
    """Choose, among usable engines that fit together, the pair with the least open work.

    Fingerprints (the revisions of a rollout) compete by what their freest pair has open, so each
    gets requests in proportion to what it can carry; one without a partner gets none of them while
    any pair exists. If there is no pair at all, the freest decode engine computes the prompt
    itself. None: no decode engine is usable.
    """
    best_prefill = _freest_of_each([p for p in prefill if p.usable])
    best_decode = _freest_of_each([d for d in decode if d.usable])
    if not best_decode:
        return None
    pairs = [
        (best_prefill[fingerprint], chosen)
        for fingerprint, chosen in best_decode.items()
        if fingerprint in best_prefill
    ]
    if not pairs:
        chosen = _freest(best_decode.values())
        reason = "no usable prefill engine" if not best_prefill else "no prefill engine fits"
        return Decision(None, chosen.key, f"{reason}: prompt computed by the decode engine")
    first, second = min(pairs, key=lambda pair: pair[0].load + pair[1].load)
    return Decision(first.key, second.key, "least loaded pair")


def decide_prefill(prefill: Sequence[EngineView], decode: Sequence[EngineView]) -> Decision | None:
    """Choose the engine for a request that is nothing but a prefill: the freest usable one of the
    prefill pool, or else of the decode pool. None: no engine is usable."""
    for engines, reason in (
        (prefill, "least loaded prefill engine"),
        (decode, "no usable prefill engine: prompt computed by a decode engine"),
    ):
        usable = [engine for engine in engines if engine.usable]
        if usable:
            key = _freest(usable).key
            return Decision(key if engines is prefill else None, key, reason)
    return None


def heir(decode: Sequence[EngineView], fingerprint: str) -> EngineView | None:
    """Who can take over KV of this fingerprint: the freest usable decode engine that fits."""
    return _freest_of_each([d for d in decode if d.usable]).get(fingerprint)


def _freest_of_each(engines: Sequence[EngineView]) -> dict[str, EngineView]:
    """By fingerprint, in the order of the first engine of each."""
    fingerprints = dict.fromkeys(engine.fingerprint for engine in engines)
    return {f: _freest(e for e in engines if e.fingerprint == f) for f in fingerprints}


def _freest(engines: Iterable[EngineView]) -> EngineView:
    """The engine with the least open work; the first of equals."""
    return min(engines, key=lambda engine: engine.load)
