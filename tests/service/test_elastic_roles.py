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
    configs = [engine_config(n, SLOW, num_blocks=2048, max_num_seqs=2) for n in names]
    with cores(keys_dir, *configs) as engines:
        prefill, *decode = (engine.address for engine in engines)
        place = SLOW, keys_dir, [prefill], decode
        async with (
            routing(*place, **promises(elastic_roles=1)) as client,
            routing(*place, **promises(elastic_roles=1)) as other,
        ):
            for router in (client, other):
                await all_usable(router, 3)
            await turn_there_and_back([client, other], engines, eventually)
            for router in (client, other):
                assert min(router.pools.turns.values()) >= 1
                said = router_report(router)
                assert [engine.verified for engine in said.engines] == [True] * 3
                assert [engine.home for engine in said.engines].count("decode") == 2
                assert all(canary.ok for canary in said.canaries)


def promises(**settings: object) -> dict[str, Any]:
    """A first token sooner than any engine computes a long prompt here, and later tokens that any
    engine writes in time. Nobody is refused for them: the policy foresees nothing."""
    slo = Slo(ttft_ms=10, inter_token_ms=100)
    return {"slo": slo, "disaggregate": "always", "policy": "least_loaded", **settings}


async def turn_there_and_back(
    routers: list[PoolClient],
    engines: list[Core],
    eventually: Callable[..., Coroutine[Any, Any, None]],
) -> None:
    """Long prompts come while answers are written, and then more answers than one engine holds, all
    by one of the routers."""
    client, links = routers[0], [link_of(router, e) for router in routers for e in engines]
    before = [await answer(client, WRITING, user) for user in range(2)]

    async def write(user: int) -> None:
        while not turned.is_set():  # a load that ends before a turn is due brings none about
            assert await answer(client, WRITING, user) == before[user]

    async def read(user: int) -> None:
        while not turned.is_set():
            await answer(client, READING, user)

    both = 2 * len(routers)
    for role, others in (("prefill", read), ("decode", write)):
        turned = asyncio.Event()
        async with asyncio.timeout(FOR_EVER_S), asyncio.TaskGroup() as load:
            for user in range(2):
                load.create_task(write(user))
                load.create_task(others(user))
            await eventually(lambda role=role: [link.role for link in links].count(role) == both)
            turned.set()
