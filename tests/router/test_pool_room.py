"""How many requests may be open at a router: one API key with many leaves room for others."""

from __future__ import annotations

import asyncio

import pytest
from free_ports import free_port
from service_kit import make_router

from diptych_protocol import EngineOverloadedError, SamplingParams
from diptych_router.requests import pool_client
from diptych_router.requests.pool_client import PoolClient


async def fill(client: PoolClient, tenant: str) -> list[asyncio.Task[None]]:
    """Ask until there is no more room; no engine is there, so everybody waits."""
    tasks: list[asyncio.Task[None]] = []

    async def ask(number: int) -> None:
        async for _ in client.generate(
            [1, 2], SamplingParams(), f"{tenant}{number}", tenant=tenant
        ):
            raise AssertionError("nobody is there to answer")

    while True:
        try:
            client.check_admission(1, num_tokens=2, tenant=tenant)
        except EngineOverloadedError:
            return tasks
        tasks.append(asyncio.create_task(ask(len(tasks))))
        while client.table.tenants.num_open(tenant) < len(tasks):
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("tenants", "open_requests"),
    [([""], [90]), (["greedy", "other", "third"], [80, 8, 1]), (["greedy", ""], [80, 10])],
)
async def test_one_key_with_many_requests_leaves_room_for_others(
    smollm2: str,
    monkeypatch: pytest.MonkeyPatch,
    tenants: list[str],
    open_requests: list[int],
) -> None:
    monkeypatch.setattr(pool_client, "MAX_OPEN_REQUESTS", 90)
    nowhere = f"127.0.0.1:{free_port()}"
    client = make_router(smollm2, nowhere, nowhere, lambda: [], hold_seconds=600.0)
    tasks: list[asyncio.Task[None]] = []
    try:
        for tenant, wanted in zip(tenants, open_requests, strict=True):
            made = await fill(client, tenant)
            tasks += made
            assert len(made) == wanted
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(client.table.tenants) == 0
    finally:
        client.shutdown()
