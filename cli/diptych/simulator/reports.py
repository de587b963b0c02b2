"""What pods tell routers, in the words of the product's engines."""

from __future__ import annotations

from diptych.simulator.plan import Pod
from diptych.simulator.workload import Request, prefix_keys
from diptych_protocol.engine_stats import KVTransferStats, SchedulerStats
from diptych_protocol.wire import PrefixChanges
from diptych_router.engines.known_prefixes import BlockNaming


def statistics(pod: Pod, *, moves: bool) -> SchedulerStats:
    """A pod's report. moves: with those that it has received."""
    engine = pod.engine
    return SchedulerStats(
        num_running=len(engine.running),
        num_waiting=len(engine.waiting),
        num_waiting_for_remote_kv=len(engine.loading),
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
            newest_moves=list(pod.moves) if moves else [],
        ),
    )


def prefix_news(pod: Pod) -> PrefixChanges | None:
    """What it remembers otherwise than when this was last asked."""
    memory = pod.engine.prefixes
    added: list[bytes] = []
    removed: list[bytes] = []
    for key in memory.changed:
        before = pod.told.pop(key, 0)
        now = memory.groups[key].blocks if key in memory.groups else 0
        if now:
            pod.told[key] = now
        if now != before:
            keys = prefix_keys(key, min(before, now), max(before, now)).tobytes()
            (added if now > before else removed).append(keys)
    memory.changed.clear()
    if not added and not removed:
        return None
    pod.news += 1
    return PrefixChanges(pod.news, b"".join(added), b"".join(removed))


def expected_news(pod: Pod, request: Request) -> PrefixChanges:
    """What it tells of a prompt that it is about to compute."""
    keys = request.view.keys
    names = [] if keys is None else [keys(BlockNaming(pod.pool.limits.block_size)).tobytes()]
    return PrefixChanges(pod.news, expected=names)
