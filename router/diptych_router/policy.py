"""Which engines serve a request. Pure: a view of the pools in, a decision and its reason out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineView:
    """What the policy may know of an engine."""

    key: str
    fingerprint: str
    """Engines exchange KV only if these are equal."""
    load: int
    """Tokens of work that this router has open there."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Prefill at `prefill` and decode at `decode`; None: the decode engine does both."""

    prefill: str | None
    decode: str
    reason: str


def decide(prefill: Sequence[EngineView], decode: Sequence[EngineView]) -> Decision | None:
    """Choose the least loaded engine of each pool among those that fit together.

    A decode engine whose fingerprint no prefill engine shares serves only when no pair exists: it
    then computes the prompt itself. None: there is no decode engine.
    """
    if not decode:
        return None
    partners = {p.fingerprint for p in prefill}
    paired = [d for d in decode if d.fingerprint in partners]
    chosen = least_loaded(paired or decode)
    if not paired:
        reason = "prefill pool is empty" if not prefill else "no prefill engine is compatible"
        return Decision(None, chosen.key, f"{reason}: prompt computed by the decode engine")
    partner = least_loaded([p for p in prefill if p.fingerprint == chosen.fingerprint])
    return Decision(partner.key, chosen.key, "least loaded pair")


def least_loaded(engines: Sequence[EngineView]) -> EngineView:
    """The engine with the least open work; the first of equals."""
    return min(engines, key=lambda engine: engine.load)
