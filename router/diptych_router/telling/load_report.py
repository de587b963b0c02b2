"""Says what a service was asked of late and what that takes its engines, so that somebody else can
find out how many of which kind it should have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from diptych_protocol.admin import LoadReport, PastRequest, PoolLoad
from diptych_protocol.wire import time_of_day
from diptych_router.requests.pool_client import PoolClient
from diptych_router.requests.request_record import RequestRecord
from diptych_router.telling.explanations import Explanations

RATES: Final = {
    "step_s": "step_s", "prompt_token_s": "prompt_token_s", "row_s": "row_s",
    "move_s": "trip_s", "move_token_s": "trip_token_s",
}  # fmt: skip
"""Field of `PoolLoad` -> column of `EngineTable`."""


def load_report(client: PoolClient, settings: Explanations) -> LoadReport:
    slo = client.table.promises.slo
    return LoadReport(
        policy=settings.policy,
        disaggregate=settings.disaggregate,
        ttft_ms=slo.ttft_ms,
        inter_token_ms=slo.inter_token_ms,
        pools=list(_pools(client)),
        requests=[found for record in client.table.records for found in _past(record)],
    )


def _past(record: RequestRecord) -> Iterator[PastRequest]:
    """Nothing for what is open, was ended by its client, or wants no tokens."""
    first_s, ended_s = record.first_token_s, record.ended_s
    if ended_s is None or record.outcome == "abort" or record.prefill_only:
        return
    if record.outcome in ("error", "refused"):
        first_s = None
    elif first_s is None:
        return
    placements = [placement for attempt in record.attempts for placement in attempt.placements]
    yield PastRequest(
        unix_time=time_of_day(record.began_s),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=placements[0].cached_tokens if placements else 0,
        output_tokens=record.tokens.total,
        first_token_s=None if first_s is None else first_s - record.began_s,
        seconds=ended_s - record.began_s,
    )


def _pools(client: PoolClient) -> Iterator[PoolLoad]:
    for role, table in client.pools.fleet.tables.items():
        links = client.pools.of(role)
        described = [link.description for link in links if link.description is not None]
        places = [row.at for row in table.rows if row["told_steps"]]
        if described and places:
            yield PoolLoad(
                role=role,
                engines=len(described),
                num_blocks=min(engine.num_blocks for engine in described),
                block_size=described[0].block_size,
                max_num_seqs=min(engine.max_num_seqs for engine in described),
                **{
                    name: float(np.median(table.column[column][places]))
                    for name, column in RATES.items()
                },
            )
