"""Turns the reports of vLLM's core about its steps into the statistics that routers know. It
performs no I/O.

A core reports after each step that had a result, so the figures of an idle core do not change.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Final, Protocol

from diptych_protocol import KVTransferStats, SchedulerStats
from diptych_vllm.serve.translation import OURS

_OF_NIXL: Final = {
    "num_failed_transfers": "loads_failed",
    "num_kv_expired_reqs": "leases_expired",
    "num_notifications_after_expiry": "late_reads",
}
"""A list of events in the statistics of NIXL's connector -> the total that counts these events."""


class CacheReport(Protocol):
    """vLLM's `PrefixCacheStats`, of one step."""

    queries: int
    hits: int


class GuessReport(Protocol):
    """vLLM's `SpecDecodingStats`, of one step."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]


class StepReport(Protocol):
    """vLLM's `SchedulerStats`, of one step."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_skipped_waiting_reqs: int
    kv_cache_usage: float
    kv_connector_stats: dict[str, Any] | None

    @property
    def prefix_cache_stats(self) -> CacheReport: ...

    @property
    def spec_decoding_stats(self) -> GuessReport | None: ...


class PromptReport(Protocol):
    """vLLM's `PromptTokenStats`, of one step."""

    computed: int
    external_kv_transfer: int


class WorkReport(Protocol):
    """vLLM's `IterationStats`, of one step."""

    num_generation_tokens: int
    num_preempted_reqs: int

    @property
    def prompt_token_stats(self) -> PromptReport: ...


class VllmLoad:
    """Running totals of one engine, and its gauges. Its data-parallel cores report one by one."""

    def __init__(
        self, blocks_total: int, connector: str, block_size: int, num_cores: int = 1
    ) -> None:
        """
        Args:
            blocks_total: those of all cores.
            connector: the name of the KV connector in vLLM; empty if there is none.
        """
        self._num_cores = num_cores
        self._gauges: dict[int, tuple[int, int, float]] = {}
        """Core -> its running requests, those that wait, and the share of its blocks in use."""
        self._counts_itself, self._block_size = connector == OURS, block_size
        self.stats = SchedulerStats(blocks_total=blocks_total, blocks_free=blocks_total)
        if connector:
            transport = connector.removesuffix("Connector").lower()
            self.stats.kv_transfer = KVTransferStats(transport=transport)
        self._last_report = 0.0

    def take(
        self, report: StepReport | None, work: WorkReport | None, now: float, core: int = 0
    ) -> None:
        """Apply a core's report of a step that ended at this time, in seconds."""
        stats = self.stats
        if report is not None:
            if stats.num_running:  # then it has worked since the report before
                stats.seconds_stepping += max(0.0, now - self._last_report)
            self._last_report = now
            stats.steps += 1
            self._gauges[core] = (
                report.num_running_reqs,
                report.num_waiting_reqs + report.num_skipped_waiting_reqs,
                min(max(report.kv_cache_usage, 0.0), 1.0),
            )
            running, waiting, used = zip(*self._gauges.values(), strict=True)
            stats.num_running, stats.num_waiting = sum(running), sum(waiting)
            blocks_used = round(sum(used) * stats.blocks_total / self._num_cores)
            stats.blocks_free = stats.blocks_total - blocks_used
            stats.prefix_cache_queries += report.prefix_cache_stats.queries
            stats.prefix_cache_hits += report.prefix_cache_stats.hits
            self._count_moves(report.kv_connector_stats or {})
            if report.spec_decoding_stats is not None:
                self._count_guesses(report.spec_decoding_stats)
        if work is not None:
            stats.tokens_generated += work.num_generation_tokens
            stats.num_preemptions += work.num_preempted_reqs
            stats.prompt_tokens_computed += work.prompt_token_stats.computed
            stats.remote_kv_tokens += work.prompt_token_stats.external_kv_transfer

    def prompt_came(self, num_tokens: int) -> None:
        """Count the blocks of so many tokens of a prompt, whose KV came from another engine. Our
        connector counts them itself."""
        if self.stats.kv_transfer is not None and not self._counts_itself:
            self.stats.kv_transfer.blocks_received += -(-num_tokens // self._block_size)

    def _count_guesses(self, grown: GuessReport) -> None:
        stats, right = self.stats, grown.num_accepted_tokens_per_pos
        stats.drafts += grown.num_drafts
        stats.draft_tokens += grown.num_draft_tokens
        stats.draft_tokens_accepted += grown.num_accepted_tokens
        stats.accepted_at = [a + b for a, b in zip_longest(stats.accepted_at, right, fillvalue=0)]

    def _count_moves(self, grown: dict[str, Any]) -> None:
        """Count the moves in our connector's figures, or in NIXL's lists of events."""
        totals = self.stats.kv_transfer
        if totals is None:
            return
        for name, number in grown.items():
            if isinstance(number, int) and hasattr(totals, name):
                setattr(totals, name, getattr(totals, name) + number)
            elif name in _OF_NIXL:
                total = _OF_NIXL[name]
                setattr(totals, total, getattr(totals, total) + len(number))
        if isinstance(sizes := grown.get("bytes_transferred"), list):
            totals.loads_completed += len(sizes)
            totals.bytes_received += int(sum(sizes))
            totals.seconds_receiving += sum(grown.get("transfer_duration", ()))
        totals.loads_started = totals.loads_completed + totals.loads_failed
        ended = totals.leases_released + totals.leases_revoked + totals.leases_expired
        totals.leases_held = max(0, totals.leases_granted - ended)
