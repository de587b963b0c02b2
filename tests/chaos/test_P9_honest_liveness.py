"""P9: who cannot serve says so in time, who merely waits does not, and nobody waits for the dead.

Long prefills, drains and SIGTERM: `tests/service/test_drain.py`; every kind of open request when a
core dies: `tests/contract/clients/test_async_llm_death.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from service_kit import engine_config, generate
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import EngineDeadError, KVTransferConfig

STALL_LIMIT_S = 4.0
PROMPT = list(range(40))
Alive = Callable[[], Awaitable[int]]


@pytest.fixture
async def engine() -> AsyncIterator[AsyncLLM]:
    config = engine_config(
        "engine",
        "dummy://?num_hidden_layers=2&hidden_size=32",
        kv_transfer=KVTransferConfig(lease_seconds=60.0),
    )
    engine = await AsyncLLM.start(config, stall_limit_s=STALL_LIMIT_S)
    yield engine
    engine.shutdown()


@pytest.fixture
async def alive(engine: AsyncLLM) -> AsyncIterator[Alive]:
    """The status that `/live` answers with."""
    app = httpx.ASGITransport(build_app(engine))
    async with httpx.AsyncClient(
        transport=app, base_url="http://engine", timeout=PATIENCE_S
    ) as http:

        async def ask() -> int:
            return (await http.get("/live")).status_code

        yield ask


async def test_P9_idle_with_a_lease_is_alive_frozen_is_not_and_death_ends_every_wait(
    engine: AsyncLLM, alive: Alive, eventually: Any
) -> None:
    remote = {"kv_transfer_params": {"do_remote_decode": True}}
    await generate(engine, {"prompt_token_ids": PROMPT}, max_tokens=1, extra_args=remote)
    begin = time.monotonic()
    while time.monotonic() < begin + STALL_LIMIT_S + 0.5:
        assert await alive() == 200, "a lease that nobody reads is no stall"
        await asyncio.sleep(0.1)
    assert (await engine.refresh_stats()).blocks_free < engine.description.num_blocks

    os.kill(engine.description.pid, signal.SIGSTOP)
    frozen = time.monotonic()
    stream = asyncio.create_task(generate(engine, {"prompt_token_ids": PROMPT}, max_tokens=5))
    call = asyncio.create_task(engine.is_sleeping())

    async def is_sick() -> bool:
        return await alive() != 200

    await eventually(is_sick)
    assert time.monotonic() - frozen > STALL_LIMIT_S - 0.1, "not before it can be known"
    assert not stream.done()
    assert not call.done()

    os.kill(engine.description.pid, signal.SIGKILL)
    for waiting in (stream, call):
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(waiting, PATIENCE_S)
    assert await alive() != 200
