"""Summarises the canaries of routers: whether KV gets from the prefill pool to the decode pool.

A canary is one real request that a router sends through a pair before it trusts an engine. This
module performs no I/O.
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
"""Characters of a canary's own error that a message repeats."""


def failures(observed: Observed, revisions: Collection[str]) -> list[str]:
    """Describe the canaries that keep an engine from being trusted.

    An engine that failed with one partner and then succeeded with another is trusted.
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
    """Return a text such as `16 blocks, 1.2 MB in 4 ms over tcp from prefill-0 to decode-0; decode
    computed 0 of ...`."""
    over = f" over {shorten(canary.transport, 32)}" if canary.transport else ""
    pair = f"from {shorten(canary.prefill, 64)} to {shorten(canary.decode, 64)}"
    moved = f"{canary.blocks} blocks, {size(canary.bytes)} in {duration(canary.milliseconds)}"
    computed = f"{canary.computed_by_decode} of {canary.prompt_tokens} prompt tokens"
    return f"{moved}{over} {pair}; decode computed {computed}."


def size(count: float) -> str:
    """Format bytes in powers of 1000."""
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
    """Return the figures of the revision that serves, or else of the one that is to.

    Known figures stay while routers have just started and report no canary.
    """
    for revision in (current, target):
        if canary := observed.newest_canary(revision):
            return TransferStatus(
                verified_revision=revision,
                verified_at=_rfc3339(canary.unix_time),
                verified_engines=len(
                    {e.engine_id for e in observed.engines if e.verified and e.revision == revision}
                ),
                blocks=canary.blocks,
                bytes=canary.bytes,
                milliseconds=canary.milliseconds,
                transport=shorten(canary.transport, 32),
            )
        if revision and previous.verified_revision == revision:
            return previous
    return TransferStatus()


def _rfc3339(unix_time: float) -> str:
    """Empty for a time that no calendar has."""
    try:
        return datetime.fromtimestamp(unix_time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return ""
