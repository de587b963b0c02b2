"""What a scheduler tells of itself, as values that do not change afterwards."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from diptych_engine.scheduling.pause import is_under_way
from diptych_engine.scheduling.scheduler_state import SchedulerState
from diptych_protocol import SchedulerStats
from diptych_protocol.admin import DrainReport
from diptych_protocol.engine_stats import MAX_TENANTS_TOLD


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """A scheduler at one moment. It costs a look at all that wait: it is made when somebody pauses
    or drains the engine. What is asked in every step is a property of the scheduler."""

    num_running: int
    num_waiting: int
    """In the queue, before it, and while everything is paused."""
    num_loading: int
    """Requests whose blocks the hinge writes to."""
    num_idle: int
    """Sessions that wait for their next piece."""
    num_leases: int
    """Leases that hold blocks."""
    any_begun: bool
    """Some request runs, waits with KV, or was preempted."""

    @classmethod
    def of(cls, state: SchedulerState) -> SchedulerView:
        return cls(
            num_running=len(state.running),
            num_waiting=state.num_waiting,
            num_loading=len(state.loading),
            num_idle=len(state.idle),
            num_leases=len(state.leased),
            any_begun=bool(state.running) or any(map(is_under_way, state.waiting)),
        )

    def drain_report(self, *, draining: bool) -> DrainReport:
        """What still keeps the engine from leaving; sessions that wait for their users count."""
        waiting = self.num_waiting + self.num_loading + self.num_idle
        return DrainReport(
            draining=draining,
            drained=draining and not (self.num_running or waiting or self.num_leases),
            num_running=self.num_running,
            num_waiting=waiting,
            leases_held=self.num_leases,
        )


def snapshot(state: SchedulerState) -> SchedulerStats:
    """The running totals with the gauges of this moment. They are the caller's, to be added to."""
    queued = state.prefixes.queued_prompt_tokens(state.requests.values())
    return msgspec.structs.replace(
        state.stats,
        num_running=len(state.running),
        num_waiting=state.num_waiting,
        num_waiting_for_remote_kv=len(state.loading),
        num_waiting_for_input=len(state.idle),
        blocks_total=state.pool.num_blocks,
        blocks_free=state.pool.num_free,
        images_encoded=state.encoder.encoded,
        encoder_cache_hits=state.encoder.hits,
        encoder_cache_tokens=state.encoder.num_tokens,
        queued_prompt_tokens=queued.total(),
        queued_tokens_of=dict(queued.most_common(MAX_TENANTS_TOLD)) if any(queued) else {},
    )
