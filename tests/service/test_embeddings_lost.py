"""Prompts to pool while engines come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_kit import Core, cores, engine_config, routing
from waits import PATIENCE_S

from diptych_protocol import (
    EngineOverloadedError,
    PoolingParams,
    PoolingRequestOutput,
    SamplingParams,
)
from diptych_router.requests.pool_client import PoolClient

MODEL = "dummy://?num_hidden_layers=2&max_position_embeddings=8192"
NOBODY = "127.0.0.1:1"
LONG = [3 + i % 50 for i in range(6000)]
"""Takes 375 steps."""


@pytest.fixture(scope="module")
def two(keys_dir: Path) -> Iterator[list[Core]]:
    """Two engines that can serve in either pool; the last test loses one."""
    options = {"num_blocks": 400, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    configs = [engine_config(f"engine-{n}", MODEL, **options) for n in range(2)]
    with cores(keys_dir, *configs) as started:
        yield started


async def embed(client: PoolClient, prompt: list[int]) -> PoolingRequestOutput:
    [output] = [o async for o in client.encode(prompt, PoolingParams(dimensions=4), "e")]
    return output


async def test_a_prompt_waits_for_an_engine_and_takes_the_first_that_can(
    keys_dir: Path, two: list[Core], eventually: Any
) -> None:
    """A held prompt to pool passes a held generation that still lacks a decode engine; without a
    prefill engine, one of the decode pool will do."""
    first, second = (core.address for core in two)
    async with routing(MODEL, keys_dir, [first], [NOBODY], verify="Off") as client:
        generating = asyncio.create_task(anext(client.generate([1, 2], SamplingParams(), "g")))
        pooling = asyncio.create_task(embed(client, LONG[:20]))
        await eventually(lambda: client.num_held > 0)
        assert (await asyncio.wait_for(pooling, PATIENCE_S)).finished
        assert client.num_held == 1
        generating.cancel()
        await asyncio.wait((generating,))
    async with routing(MODEL, keys_dir, [NOBODY], [second], verify="Off") as client:
        assert (await asyncio.wait_for(embed(client, LONG[:20]), PATIENCE_S)).finished
    async with routing(MODEL, keys_dir, [NOBODY], [NOBODY], hold_seconds=0) as client:
        with pytest.raises(EngineOverloadedError, match="no engine is usable"):
            await embed(client, [1])
        with pytest.raises(EngineOverloadedError, match="no engine is up"):
            await client.get_supported_tasks()


async def test_a_prompt_goes_to_another_engine_when_its_own_is_lost(
    keys_dir: Path, two: list[Core], eventually: Any
) -> None:
    """There is no decode engine at all: nothing is to be decoded."""
    addresses = [core.address for core in two]
    async with routing(MODEL, keys_dir, addresses, [NOBODY], verify="Off") as client:
        await eventually(lambda: len(client.pools.of("prefill")) == 2)
        asked = asyncio.create_task(embed(client, LONG))
        chosen = await eventually(
            lambda: next((link for link in client.pools.of("prefill") if link.open_tokens), None)
        )
        two[addresses.index(chosen.endpoint.removeprefix("tcp://"))].kill()
        assert not asked.done()
        output = await asyncio.wait_for(asked, PATIENCE_S)
        assert output.outputs.data.shape == (4,)
        assert output.prompt_token_ids == LONG
        assert all(link.open_tokens == 0 for link in client.pools.links.values())
        assert len(client.pools.of("prefill")) == 1
