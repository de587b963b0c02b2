"""What pods tell routers, in the words of the product's engines."""

from __future__ import annotations

from benchmarks.simulate.plan import Pod
from benchmarks.simulate.workload import prefix_keys

from diptych_protocol.wire import KVTransferStats, PrefixChanges, SchedulerStats


def statistics(pod: Pod) -> SchedulerStats:
    """A pod's report."""
    engine = pod.engine
    return SchedulerStats(
        num_running=len(engine.running),
        num_waiting=len(engine.waiting),
        blocks_total=engine.limits.num_blocks,
        blocks_free=engine.free,
        queued_prompt_tokens=engine.queued_tokens(),
        prompt_tokens_computed=engine.computed_tokens,
        tokens_generated=engine.generated_tokens,
        steps=engine.step,
        seconds_stepping=pod.busy_s,
        kv_transfer=KVTransferStats(
            loads_completed=pod.loads,
            blocks_received=pod.received_tokens // engine.limits.block_size,
            seconds_receiving=pod.receiving_s,
        ),
    )


def prefix_news(pod: Pod) -> PrefixChanges | None:
    """What it remembers otherwise than when this was last asked."""
    pod.engine.prefixes.fresh = False
    remembered = pod.engine.prefixes.remembered()
    added: list[bytes] = []
    removed: list[bytes] = []
    for prefix in remembered.keys() | pod.told.keys():
        before, now = pod.told.get(prefix, 0), remembered.get(prefix, 0)
        (added if now > before else removed).append(
            prefix_keys(prefix, min(before, now), max(before, now)).tobytes()
        )
    changed = remembered != pod.told
    pod.told = remembered
    if not changed:
        return None
    pod.news += 1
    return PrefixChanges(pod.news, b"".join(added), b"".join(removed))
