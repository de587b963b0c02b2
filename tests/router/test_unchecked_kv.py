"""Engines that do not check the KV that they receive, and cannot free what they have lent."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
import pytest
from engine_kit.fake_core import FakeCore, description, said
from free_ports import free_port

from diptych_protocol import (
    EngineCoreRequest,
    KVTransferStats,
    RouterConfig,
    SchedulerStats,
    fingerprint,
)
from diptych_protocol.wire import DOUBT_KV, Abilities
from diptych_router.engines.discovery import Target
from diptych_router.engines.engine_link import EngineLink
from diptych_router.engines.engine_table import Role
from diptych_router.requests.pools.pools import Pools

LEASE = {"do_remote_prefill": True, "remote_engine_id": "prefill"}
COMPUTED = 7
"""The token that the decode engine generates if it has computed the prompt itself."""


def core(role: Role, target: Target, checks_kv: bool) -> FakeCore:
    abilities = Abilities(checks_kv=checks_kv, frees_leases=checks_kv)
    about = msgspec.structs.replace(
        description("m"), engine_id=role, epoch=role, abilities=abilities, kv_transfer=True
    )
    stats = SchedulerStats(kv_transfer=KVTransferStats())
    return FakeCore(
        f"tcp://{target[0]}:{target[1]}",
        describe=msgspec.to_builtins(about),
        stats=stats,
        reject_kv_transfer=None,
    )


def params_of(request: EngineCoreRequest) -> dict[str, Any]:
    return (request.sampling.extra_args or {}).get("kv_transfer_params") or {}


async def serve_prefill(engine: FakeCore) -> None:
    [asked] = await engine.added(1)
    output = said(asked, COMPUTED, ends=True)
    output.kv_transfer_params = LEASE
    await engine.tell(output)


async def serve_decode(engine: FakeCore, foreign: int) -> None:
    """A request with KV is answered with the token `foreign`, and one without with `COMPUTED`."""
    for number in range(1, 4):
        asked = (await engine.added(number))[-1]
        num_tokens = len(asked.prompt_token_ids or ())
        is_handed_over = bool(params_of(asked))
        done = len(asked.generated_token_ids or ())
        token = foreign if is_handed_over else COMPUTED
        output = said(asked, *[token] * (4 - done), ends=True)
        if is_handed_over:
            output.num_received_tokens = num_tokens
            moved = KVTransferStats(blocks_received=-(-num_tokens // 16))
            engine.answers["stats"] = SchedulerStats(kv_transfer=moved)
        await engine.tell(output)


@pytest.mark.parametrize(
    ("checks_kv", "foreign", "error"),
    [
        (True, 9, ""),
        (False, COMPUTED, ""),
        (False, 9, "token 2 is 9, and decode alone answers 7: its KV is wrong"),
    ],
)
async def test_kv_is_compared_freed_and_doubted_where_engines_do_not_check_it(
    checks_kv: bool, foreign: int, error: str, eventually: Any
) -> None:
    targets: dict[Role, list[Target]] = {
        role: [("127.0.0.1", free_port())] for role in ("prefill", "decode")
    }
    fakes = {role: core(role, target, checks_kv) for role, [target] in targets.items()}
    connect = partial(
        EngineLink, read_keys=None, on_outputs=lambda *_: None, on_lost=lambda *_: None,
        on_hang=lambda _: None,
    )  # fmt: skip
    pools = Pools(RouterConfig(model="m"), targets, connect, None, lambda: None)
    serving = [
        asyncio.create_task(serve_prefill(fakes["prefill"])),
        asyncio.create_task(serve_decode(fakes["decode"], foreign)),
    ]
    pools.start()
    try:
        await eventually(lambda: pools.canaries)
        assert [report.error for report in pools.canaries.values()] == [error]
        await pools.reject("r", {**LEASE, "compat": fingerprint({})})
        told = {role: fake.calls("reject_kv_transfer") for role, fake in fakes.items()}
        assert told == {"prefill": int(checks_kv), "decode": int(not checks_kv)}
        late = KVTransferStats(late_reads=1)
        fakes["prefill"].answers["stats"] = SchedulerStats(kv_transfer=late)
        await eventually(lambda: fakes["decode"].calls(DOUBT_KV))
        assert fakes["prefill"].calls(DOUBT_KV) == 0
    finally:
        pools.close()
        for task in serving:
            task.cancel()
        for fake in fakes.values():
            await fake.close()
