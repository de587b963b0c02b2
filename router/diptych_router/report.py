"""What a router tells the operator: `GET /admin/state`."""

from __future__ import annotations

from diptych_protocol import KVTransferStats
from diptych_protocol.admin import EngineReport, PromiseCount, RouterReport
from diptych_router.engine_link import EngineLink
from diptych_router.pool_client import PoolClient
from diptych_router.pools import Pools


def router_report(client: PoolClient) -> RouterReport:
    """The state of this moment, with the statistics that engines sent last."""
    reason = client.why_not_ready()
    pools = client.pools
    return RouterReport(
        ready=not reason,
        reason=reason,
        open_requests=client.output_processor.num_unfinished,
        held_requests=client.num_held,
        serving_revisions=pools.serving.revisions,
        engines=[engine_report(pools, link) for link in pools.links.values() if link.up],
        canaries=list(pools.canaries.values()),
        promises=[
            PromiseCount(**kind._asdict(), requests=requests)
            for kind, requests in client.table.promises.counts.items()
        ],
    )


def engine_report(pools: Pools, link: EngineLink) -> EngineReport:
    stats = link.stats
    transfer = stats.kv_transfer or KVTransferStats()
    held = stats.blocks_total - stats.blocks_free
    return EngineReport(
        engine_id=link.name,
        role=link.role,
        revision=link.revision,
        usable=pools.usable(link),
        listed=link.listed,
        draining=stats.draining,
        paused=stats.paused,
        verified=pools.verified(link),
        open_tokens=link.open_tokens,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        queued_prompt_tokens=stats.queued_prompt_tokens,
        kv_usage=held / max(1, stats.blocks_total),
        leases_held=transfer.leases_held,
        blocks_held=transfer.blocks_held,
        loads_failed=transfer.loads_failed,
        leases_expired=transfer.leases_expired,
        stale_reads_refused=transfer.stale_reads_refused,
    )
