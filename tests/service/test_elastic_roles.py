"""Real engines change their roles as the load turns, and no request notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from service_kit import Core, all_usable, cores, engine_config, generate, link_of, routing
from waits import FOR_EVER_S

from diptych_protocol import Slo, TokensPrompt
from diptych_router.requests.pool_client import PoolClient
from diptych_router.telling.admin_port import router_report

SLOW = "dummy://?num_hidden_layers=8&hidden_size=256&intermediate_size=1024&max_position_embeddings=4096"
READING, WRITING = (1500, 2), (8, 200)
"""Tokens of a prompt and of its answer."""
USERS = 4


def prompt_of(tokens: int, user: int) -> TokensPrompt:
    return TokensPrompt(prompt_token_ids=[3 + (user * 31 + at) % 90 for at in range(tokens)])


async def answer(client: PoolClient, kind: tuple[int, int], user: int) -> list[int]:
    tokens, wanted = kind
    out = await generate(client, prompt_of(tokens, user), max_tokens=wanted, ignore_eos=True)
    return list(out.outputs[0].token_ids)


@pytest.mark.slow
async def test_engines_turn_as_the_load_turns_and_every_answer_stays_the_same(
    keys_dir: Path, eventually: Callable[..., Coroutine[Any, Any, None]]
) -> None:
    names = ("prefill-0", "decode-0", "decode-1")
    configs = [engine_config(n, SLOW, num_blocks=2048, max_num_seqs=8) for n in names]
    with cores(keys_dir, *configs) as engines:
        prefill, *decode = (engine.address for engine in engines)
        async with routing(
            SLOW, keys_dir, [prefill], decode, **promises(elastic_roles=1)
        ) as client:
            await all_usable(client, 3)
            await turn_there_and_back(client, engines, eventually)
            assert min(client.pools.turns.values()) >= 1
            said = router_report(client)
            assert [engine.verified for engine in said.engines] == [True] * 3
            assert [engine.home for engine in said.engines].count("decode") == 2
            assert all(canary.ok for canary in said.canaries)


def promises(**settings: object) -> dict[str, Any]:
    """Which no engine keeps here, and for which nobody is refused: the policy foresees nothing."""
    slo = Slo(ttft_ms=100, inter_token_ms=1)
    return {"slo": slo, "disaggregate": "always", "policy": "least_loaded", **settings}


async def turn_there_and_back(
    client: PoolClient, engines: list[Core], eventually: Callable[..., Coroutine[Any, Any, None]]
) -> None:
    """Long prompts come while answers are written, and then long answers are written."""
    before = [await answer(client, WRITING, user) for user in range(2)]
    streams = [asyncio.create_task(answer(client, WRITING, user)) for user in range(2)]
    prompts = [asyncio.create_task(answer(client, READING, user)) for user in range(USERS)]
    links = [link_of(client, engine) for engine in engines]
    await eventually(lambda: [link.role for link in links].count("prefill") == 2)
    assert await asyncio.wait_for(asyncio.gather(*streams), FOR_EVER_S) == before
    await asyncio.wait_for(asyncio.gather(*prompts), FOR_EVER_S)
    writers = [asyncio.create_task(answer(client, WRITING, user % 2)) for user in range(USERS)]
    await eventually(lambda: [link.role for link in links].count("decode") == 2)
    assert await asyncio.wait_for(asyncio.gather(*writers), FOR_EVER_S) == before * (USERS // 2)
