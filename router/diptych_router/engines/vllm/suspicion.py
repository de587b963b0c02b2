"""What speaks against the hand-offs of a vLLM server, from its metrics and its silence. Pure."""

from __future__ import annotations

from diptych_router.engines.vllm.metrics import ServerFigures
from diptych_router.engines.vllm.references import MARGIN


class Suspicion:
    """Compares what one server tells with what it told before. Reasons are texts; empty: none.

    Reads that failed are no reason: their requests have failed, which the breakers of both engines
    count.
    """

    def __init__(self, lease_seconds: float) -> None:
        self._patience_s = lease_seconds * MARGIN
        self._num_late: int | None = None

    def late_reads(self, figures: ServerFigures) -> str:
        """Somebody has read blocks of this server that were free again: it may have read anything,
        and its answer looks like any other."""
        before, self._num_late = self._num_late, figures.num_late
        if before is None or figures.num_late <= before:
            return ""
        return "blocks were read after their lease had ended"

    def long_silence(self, silent_s: float, own_s: float, *, reads: bool) -> str:
        """Nothing shows that it did not stand still for so long that leases ended before it read
        their blocks.

        own_s: how many of the seconds this process stood still. They prove nothing either way, so
        they are told, and count. reads: it was asked to read blocks lately.
        """
        if not reads or silent_s <= self._patience_s:
            return ""
        own = f" (for {own_s:.0f} s of it, this router did not ask)" if own_s >= 1 else ""
        silence = f"it did not answer for {silent_s:.0f} s{own}"
        return f"{silence}, and then may have read blocks too late"
