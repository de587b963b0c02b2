"""What a scheduler tells of itself."""

from __future__ import annotations

from diptych_engine.scheduling.scheduler_state import SchedulerState
from diptych_protocol import SchedulerStats
from diptych_protocol.admin import DrainReport


def snapshot(scheduler: SchedulerState) -> SchedulerStats:
    """The running totals with the gauges of this moment."""
    stats = scheduler.stats
    stats.num_running = len(scheduler.running)
    stats.num_waiting = scheduler.num_waiting
    stats.num_waiting_for_remote_kv = len(scheduler.loading)
    stats.num_waiting_for_input = len(scheduler.idle)
    stats.blocks_total = scheduler.pool.num_blocks
    stats.blocks_free = scheduler.pool.num_free
    stats.queued_prompt_tokens = scheduler.prefixes.queued_prompt_tokens(
        scheduler.requests.values()
    )
    return stats


def drain_report(scheduler: SchedulerState, *, draining: bool) -> DrainReport:
    """What still keeps the engine from leaving; sessions that wait for their users count."""
    running, leases = len(scheduler.running), len(scheduler.leased)
    waiting = scheduler.num_waiting + len(scheduler.loading) + len(scheduler.idle)
    return DrainReport(
        draining=draining,
        drained=draining and not (running or waiting or leases),
        num_running=running,
        num_waiting=waiting,
        leases_held=leases,
    )
