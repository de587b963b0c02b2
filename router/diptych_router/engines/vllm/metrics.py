"""From the page of metrics of a vLLM server to the statistics that a router knows. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from diptych_protocol import KVTransferStats, SchedulerStats, UtilityError

PREFIX: Final = "vllm:"
RUNNING: Final = "vllm:num_requests_running"
_SUMS: Final = {
    RUNNING: "num_running",
    "vllm:num_requests_waiting": "num_waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prompt_tokens_cached_total": "cached_tokens",
    "vllm:generation_tokens_total": "tokens_generated",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits",
    "vllm:num_preemptions_total": "num_preemptions",
    "vllm:iteration_tokens_total_count": "steps",
}
"""Sample -> what it is here. Samples of data-parallel cores of one server add up."""
_TRANSFERS: Final = {
    "vllm:nixl_bytes_transferred_sum": "bytes_received",
    "vllm:nixl_bytes_transferred_count": "loads_completed",
    "vllm:nixl_xfer_time_seconds_sum": "seconds_receiving",
    "vllm:nixl_num_failed_transfers_total": "loads_failed",
    "vllm:nixl_num_kv_expired_reqs_total": "leases_expired",
    "vllm:diptych_bytes_received_total": "bytes_received",
    "vllm:diptych_blocks_received_total": "blocks_received",
    "vllm:diptych_loads_completed_total": "loads_completed",
    "vllm:diptych_loads_failed_total": "loads_failed",
    "vllm:diptych_leases_expired_total": "leases_expired",
}
"""The same of what a KV connector tells."""
LATE: Final = "vllm:nixl_num_notifications_after_expiry_total"
_USAGE: Final = "vllm:kv_cache_usage_perc"
_CACHE: Final = "vllm:cache_config_info"
_WANTED: Final = (*_SUMS, *_TRANSFERS, LATE, _USAGE, _CACHE)


class NoMetricsError(UtilityError):
    """A page is not the metrics of a vLLM server."""


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """What one page of metrics tells."""

    stats: SchedulerStats
    block_size: int
    num_blocks: int
    num_late: int = 0
    """How often a decode engine said that it had read blocks of this one which were free again."""


def read_metrics(page: str) -> ServerFigures:
    """Raises `NoMetricsError`, naming what is missing or wrong.

    Only the lines that are wanted are parsed: a page has hundreds, and comes every second.
    """
    sums: dict[str, float] = {}
    usage: list[float] = []
    sizes: list[tuple[int, int]] = []
    text = "\n".join(line for line in page.splitlines() if line.startswith(_WANTED)) + "\n"
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == _USAGE:
                    usage.append(sample.value)
                elif sample.name == _CACHE:
                    labels = sample.labels
                    sizes.append((int(labels["block_size"]), int(labels["num_gpu_blocks"])))
                else:
                    sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        figures = {name: int(sums.get(sample, 0.0)) for sample, name in _SUMS.items()}
        kv_transfer = _transfers(sums)
        late = int(sums.get(LATE, 0.0))
    except (ValueError, KeyError, OverflowError) as exc:
        raise NoMetricsError(f"its metrics cannot be read: {exc!r}") from exc
    if RUNNING not in sums or not sizes or not usage:
        raise NoMetricsError(f"its metrics lack {RUNNING}, {_USAGE} or {_CACHE}: is it vLLM?")
    block_size, num_blocks = sizes[0][0], sum(blocks for _, blocks in sizes)
    if block_size < 1 or num_blocks < 1:
        raise NoMetricsError(f"{_CACHE} says that there are no blocks")
    used = min(max(sum(usage) / len(usage), 0.0), 1.0)
    if math.isnan(used):
        raise NoMetricsError(f"{_USAGE} is no number")
    stats = SchedulerStats(
        num_running=figures["num_running"],
        num_waiting=figures["num_waiting"],
        blocks_total=num_blocks,
        blocks_free=num_blocks - round(used * num_blocks),
        prompt_tokens_computed=max(0, figures["prompt_tokens"] - figures["cached_tokens"]),
        tokens_generated=figures["tokens_generated"],
        prefix_cache_queries=figures["prefix_cache_queries"],
        prefix_cache_hits=figures["prefix_cache_hits"],
        num_preemptions=figures["num_preemptions"],
        steps=figures["steps"],
        kv_transfer=kv_transfer,
    )
    return ServerFigures(stats, block_size, num_blocks, late)


def _transfers(sums: dict[str, float]) -> KVTransferStats | None:
    """What its KV connector has moved; None: it has none that tells."""
    told = {name: sums[sample] for sample, name in _TRANSFERS.items() if sample in sums}
    if not told:
        return None
    stats = KVTransferStats(seconds_receiving=told.pop("seconds_receiving", 0.0))
    for name, value in told.items():
        setattr(stats, name, int(value))
    return stats
