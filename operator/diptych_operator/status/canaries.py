"""What the routers' canaries say of the hinge between the pools. Pure.

A canary is one real request that a router sent through a pair before it trusted an engine.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

from diptych_operator.api.status import TransferStatus
from diptych_operator.status.diagnose import shorten
from diptych_operator.status.observed import Observed
from diptych_operator.status.reasons import Reason
from diptych_protocol.admin import CanaryReport

MAX_ERROR = 300
"""Characters of a canary's own words that a message repeats."""


def newest(observed: Observed, revision: str) -> CanaryReport | None:
    """The last canary that crossed this revision's hinge."""
    crossed = [
        canary
        for router in observed.routers
        for canary in router.canaries
        if canary.ok and canary.revision == revision and revision
    ]
    return max(crossed, key=lambda c: (c.unix_time, c.prefill, c.decode), default=None)


def failures(observed: Observed, revisions: Collection[str]) -> list[str]:
    """The canaries that keep an engine from being trusted, in words.

    An engine that failed with one partner and then crossed with another is trusted: a failure that
    is past says nothing.
    """
    found = set()
    for router in observed.routers:
        distrusted = {engine.engine_id for engine in router.engines if not engine.verified}
        for canary in router.canaries:
            concerned = canary.revision in revisions and not canary.ok
            if concerned and distrusted & {canary.prefill, canary.decode}:
                found.add(_failure(canary))
    return sorted(found)


def _failure(canary: CanaryReport) -> str:
    error = shorten(canary.error, MAX_ERROR).rstrip(".") or "the router gives no reason"
    pair = f"{shorten(canary.prefill, 64)} to {shorten(canary.decode, 64)}"
    return f"KV transfer from {pair} failed: {error}. {Reason.TRANSFER_FAILED.remedy}"


def figures(canary: CanaryReport) -> str:
    """Such as `16 blocks, 1.2 MB in 4 ms over tcp from P to D; decode computed 0 of ...`."""
    over = f" over {shorten(canary.transport, 32)}" if canary.transport else ""
    pair = f"from {shorten(canary.prefill, 64)} to {shorten(canary.decode, 64)}"
    moved = f"{canary.blocks} blocks, {size(canary.bytes)} in {duration(canary.milliseconds)}"
    computed = f"{canary.computed_by_decode} of {canary.prompt_tokens} prompt tokens"
    return f"{moved}{over} {pair}; decode computed {computed}."


def size(count: float) -> str:
    """Bytes in powers of 1000, as people read them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.95:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(milliseconds: float) -> str:
    if milliseconds >= 9999.5:
        return f"{milliseconds / 1000:.1f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 9.95 else f"{milliseconds:.1f} ms"


def transfer_status(
    observed: Observed, previous: TransferStatus, current: str, target: str
) -> TransferStatus:
    """Figures of the revision that serves, or else of the one that is to.

    What was known stays while routers that have just started tell of no canary.
    """
    for revision in (current, target):
        if canary := newest(observed, revision):
            return TransferStatus(
                verified_revision=revision,
                verified_at=_rfc3339(canary.unix_time),
                verified_engines=_verified_engines(observed, revision),
                blocks=canary.blocks,
                bytes=canary.bytes,
                milliseconds=canary.milliseconds,
                transport=shorten(canary.transport, 32),
            )
        if revision and previous.verified_revision == revision:
            return previous
    return TransferStatus()


def _verified_engines(observed: Observed, revision: str) -> int:
    engines = {
        engine.engine_id
        for router in observed.routers
        for engine in router.engines
        if engine.verified and engine.revision == revision
    }
    return len(engines)


def _rfc3339(unix_time: float) -> str:
    """Empty for a time that no calendar has."""
    try:
        return datetime.fromtimestamp(unix_time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return ""
