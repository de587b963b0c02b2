"""What a service was asked of late, and what that takes its engines, for whoever finds out how many
engines of which kind it should have."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

import numpy as np

from diptych_protocol import CurveKeys
from diptych_protocol.admin import LoadReport, PastRequest, PoolLoad
from diptych_protocol.wire import time_of_day
from diptych_router.requests.pool_client import PoolClient
from diptych_router.requests.request_record import KEPT_COUNTS, RequestRecord
from diptych_router.telling.explanations import Explanations

RATES: Final = {
    "step_s": "step_s", "prompt_token_s": "prompt_token_s", "row_s": "row_s",
    "move_s": "trip_s", "move_token_s": "trip_token_s",
}  # fmt: skip
"""Field of `PoolLoad` -> column of `EngineTable`."""
MOST_NAMES: Final = 1 << 17
"""A report names so many prefixes, those of the newest requests: of 1,250 at least."""
NAME_BYTES: Final = 6
"""Any program reads a number of so many bytes from JSON, and hardly two of a report are equal by
chance."""


class PrefixNames:
    """Names of prefixes. They are the same at all routers of a service, and say only which prompts
    begin alike: who has no key of the service cannot try which prompt has a name."""

    def __init__(self, keys: CurveKeys) -> None:
        self._secret = keys.secret.encode()
        self._left = MOST_NAMES

    def of(self, record: RequestRecord) -> list[tuple[int, int]] | None:
        """See `PastRequest.prefixes`."""
        if record.keys is None or len(record.keys) > self._left:
            return None
        self._left -= len(record.keys)
        ends = KEPT_COUNTS[: len(record.keys)] * record.block_size
        return [
            (end, self._name(key))
            for end, key in zip(ends.tolist(), record.keys.tolist(), strict=True)
            if end <= record.prompt_tokens  # one that goes on after a loss has more
        ]

    def _name(self, key: int) -> int:
        content, label = key.to_bytes(8), b"diptych prefix"
        made = blake2b(content, key=self._secret, person=label, digest_size=NAME_BYTES)
        return int.from_bytes(made.digest())


async def load_report(client: PoolClient, settings: Explanations, keys: CurveKeys) -> LoadReport:
    """Return what the service was asked of late, and what that takes its engines. keys: the
    service's. Streams go on meanwhile."""
    slo, names = client.table.promises.slo, PrefixNames(keys)
    requests: list[PastRequest] = []
    for record in [*client.table.records]:
        requests += _past(record, names)
        await asyncio.sleep(0)
    return LoadReport(
        policy=settings.policy,
        disaggregate=settings.disaggregate,
        ttft_ms=slo.ttft_ms,
        inter_token_ms=slo.inter_token_ms,
        pools=list(_pools(client)),
        requests=requests,
    )


def _past(record: RequestRecord, names: PrefixNames) -> Iterator[PastRequest]:
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
        prefixes=names.of(record),
    )


def _pools(client: PoolClient) -> Iterator[PoolLoad]:
    pools = {
        role: [link.description for link in client.pools.of(role) if link.description is not None]
        for role in client.pools.fleet.tables
    }
    processors = [engine.processors for described in pools.values() for engine in described]
    shared = len(processors) > 1 and processors[0] != 0 and len(set(processors)) == 1
    for role, table in client.pools.fleet.tables.items():
        described = pools[role]
        places = [row.at for row in table.rows if row["told_steps"]]
        if described and places:
            yield PoolLoad(
                role=role,
                engines=len(described),
                num_blocks=min(engine.num_blocks for engine in described),
                block_size=described[0].block_size,
                max_num_seqs=min(engine.max_num_seqs for engine in described),
                max_num_batched_tokens=described[0].max_num_batched_tokens,
                enough_prompt_tokens=described[0].enough_prompt_tokens,
                processors_part=described[0].processors_part if shared else 0.0,
                **{
                    name: float(np.median(table.column[column][places]))
                    for name, column in RATES.items()
                },
            )
