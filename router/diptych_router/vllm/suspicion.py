"""What speaks against the hand-offs of a vLLM server, from its metrics and its silence. Pure."""

from __future__ import annotations

from diptych_router.vllm.metrics import ServerFigures
from diptych_router.vllm.references import MARGIN
from diptych_router.vllm.service import VllmService


class Suspicion:
    """Compares what one server tells with what it told before. Reasons are texts; empty: none."""

    def __init__(self, service: VllmService) -> None:
        self._unchecked = service.reads_unchecked
        self._patience_s = service.lease_seconds * MARGIN
        self._late: int | None = None
        self._failed: int | None = None

    def of_reads_from_it(self, figures: ServerFigures) -> str:
        """Somebody has read blocks of this server that were free again: it may have read anything,
        and its answer looks like any other."""
        before, self._late = self._late, figures.num_late
        if before is None or figures.num_late <= before:
            return ""
        return "blocks were read after their lease had ended"

    def of_its_reads(self, figures: ServerFigures) -> str:
        """Reads of this server have failed. Their requests have been told."""
        before, self._failed = self._failed, figures.num_failed
        if before is None or figures.num_failed <= before:
            return ""
        return "hand-offs to it failed"

    def of_what_it_read(self, silent_s: float) -> str:
        """It stood still for so long that leases may have ended before it read their blocks."""
        if not self._unchecked or silent_s <= self._patience_s:
            return ""
        return f"it did not answer for {silent_s:.0f} s, and then may have read blocks too late"
