"""What vLLM's core reports, as the statistics of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from diptych_protocol import InvalidRequestError
from diptych_vllm.serve.load import VllmLoad
from diptych_vllm.versions import num_cores


@dataclass
class Cache:
    queries: int = 0
    hits: int = 0


@dataclass
class Guesses:
    """vLLM's `SpecDecodingStats`."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]


@dataclass
class Step:
    """vLLM's `SchedulerStats`."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: Cache = field(default_factory=Cache)
    kv_connector_stats: dict[str, Any] | None = None
    spec_decoding_stats: Guesses | None = None


@dataclass
class Prompts:
    computed: int = 0
    external_kv_transfer: int = 0


@dataclass
class Work:
    """vLLM's `IterationStats`."""

    num_generation_tokens: int = 0
    num_preempted_reqs: int = 0
    prompt_token_stats: Prompts = field(default_factory=Prompts)


def test_gauges_are_the_newest_and_totals_add_up() -> None:
    load = VllmLoad(64, "", 32)
    load.take(Step(2, 1, 3, 0.25, Cache(10, 4)), Work(2, 1, Prompts(8, 5)), 1.0)
    load.take(Step(1, 0, 0, 0.5, Cache(3, 1)), Work(1), 3.0)
    stats = load.stats
    assert (stats.num_running, stats.num_waiting, stats.blocks_free) == (1, 0, 32)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (13, 5)
    assert (stats.tokens_generated, stats.num_preemptions, stats.steps) == (3, 1, 2)
    assert (stats.prompt_tokens_computed, stats.remote_kv_tokens) == (8, 5)
    assert stats.kv_transfer is None


def test_cores_report_one_by_one() -> None:
    load = VllmLoad(128, "", 32, num_cores=2)
    load.take(Step(2, 1, kv_cache_usage=0.5), Work(2), 1.0, 0)
    load.take(Step(3, 0, 2, kv_cache_usage=0.25), Work(3), 2.0, 1)
    stats = load.stats
    assert (stats.num_running, stats.num_waiting, stats.blocks_free) == (5, 3, 128 - 32 - 16)
    load.take(Step(), Work(2), 3.0, 0)
    assert (stats.num_running, stats.num_waiting, stats.blocks_free) == (3, 2, 128 - 16)
    assert (stats.tokens_generated, stats.seconds_stepping) == (7, 2.0)


def test_several_api_servers_are_refused_by_name() -> None:
    """vLLM starts as many as cores, if nobody says how many."""
    parallel = SimpleNamespace(_api_process_count=2)
    llm = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    with pytest.raises(InvalidRequestError, match="add --api-server-count 1"):
        num_cores(llm)


def test_guesses_add_up() -> None:
    load = VllmLoad(64, "", 32)
    for guesses in (None, Guesses(2, 6, 3, [2, 1, 0]), Guesses(1, 3, 1, [1, 0, 0])):
        load.take(Step(spec_decoding_stats=guesses), None, 1.0)
    stats = load.stats
    assert (stats.drafts, stats.draft_tokens, stats.draft_tokens_accepted) == (3, 9, 4)
    assert stats.accepted_at == [3, 1, 0]


def test_time_counts_while_requests_run() -> None:
    load = VllmLoad(64, "", 32)
    for running, now in ((1, 10.0), (0, 12.0), (1, 50.0), (1, 51.0)):
        load.take(Step(running), None, now)
    assert load.stats.seconds_stepping == 3.0


def test_our_connector_s_figures_are_added() -> None:
    load = VllmLoad(64, "DiptychConnector", 32)
    load.take(Step(kv_connector_stats={"blocks_received": 7, "loads_completed": 1}), None, 1.0)
    load.take(Step(kv_connector_stats={"leases_granted": 3, "leases_revoked": 1}), None, 2.0)
    load.prompt_came(65)  # counted already
    moved = load.stats.kv_transfer
    assert moved is not None
    assert (moved.transport, moved.blocks_received, moved.loads_started) == ("diptych", 7, 1)
    assert moved.leases_held == 2


def test_nixl_s_lists_are_counted() -> None:
    load = VllmLoad(64, "NixlConnector", 32)
    news = {
        "bytes_transferred": [100, 50],
        "transfer_duration": [0.5, 0.25],
        "num_failed_transfers": [1],
        "num_kv_expired_reqs": [1, 1],
        "num_notifications_after_expiry": [1],
    }
    load.take(Step(kv_connector_stats=news), None, 1.0)
    load.prompt_came(65)
    moved = load.stats.kv_transfer
    assert moved is not None
    assert (moved.loads_completed, moved.bytes_received, moved.seconds_receiving) == (2, 150, 0.75)
    assert (moved.loads_failed, moved.leases_expired, moved.blocks_received) == (1, 2, 3)
    assert moved.late_reads == 1
