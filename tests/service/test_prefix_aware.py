"""Two prefill engines behind a router that knows what each of them remembers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from service_kit import engine_config, generate, healthy, make_router, start_engine

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.curve import read_keys
from diptych_frontend.processors import processors_in_common
from diptych_protocol import CurveKeys, PromptType
from diptych_protocol.block_hashes import extend_block_hashes
from diptych_router.engines.engine_table import ROLES
from diptych_router.engines.known_prefixes import keys_of
from diptych_router.requests.pool_client import PoolClient
from diptych_router.requests.pools.health_watch import run_canary

pytestmark = pytest.mark.asyncio(loop_scope="module")

INSTRUCTIONS = [
    "You answer letters to a lighthouse keeper, politely and in one sentence. " * 40,
    "You translate the names of birds into the languages of their countries. " * 40,
]
"""So long that no engine computes them anew because the one that has them is slow at the moment."""
QUESTIONS = ["Is it lonely?", "What of storms?", "And the lamp?", "Who comes by?"]


@dataclass
class Service:
    router: PoolClient
    prefill: list[AsyncLLM]
    decode: AsyncLLM
    keys: CurveKeys
    addresses: tuple[str, str]

    async def hits(self) -> list[int]:
        """Prompt tokens that each prefill engine found remembered, since its start."""
        return [(await engine.refresh_stats()).prefix_cache_hits for engine in self.prefill]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(smollm2: str, keys_dir: Path) -> AsyncIterator[Service]:
    names = ("prefill-0", "prefill-1", "decode-0")
    started = await asyncio.gather(
        *(start_engine(engine_config(name, smollm2), keys_dir) for name in names)
    )
    [(p0, at0), (p1, at1), (decode, at_d)] = started
    keys = read_keys(keys_dir)
    addresses = (f"{at0},{at1}", at_d)
    router = make_router(
        smollm2, *addresses, lambda: [keys], policy="prefix_aware", disaggregate="always"
    )
    router.start()
    try:
        await healthy(router)
        yield Service(router, [p0, p1], decode, keys, addresses)
    finally:
        router.shutdown()
        for engine in (p0, p1, decode):
            engine.shutdown()


def remembered_blocks(router: PoolClient) -> int:
    return router.pools.fleet.known.index.held.num_blocks


@dataclass(frozen=True)
class Course:
    """Who computed a prompt, and how many of its tokens came from another engine's memory.

    Engines are about equal, but a busy machine makes one of them seem slow. Another one is then
    cheaper with the beginning fetched: nobody computes it again.
    """

    engine: str
    fetched: int


async def course_of(service: Service, prompt: PromptType) -> Course:
    metrics = (await generate(service.router, prompt, max_tokens=2)).metrics
    fetches = str(metrics.get("fetches", "0 tokens"))
    return Course(str(metrics["prefill"]), int(fetches.partition(" ")[0]))


async def test_prompts_go_where_their_beginning_is_remembered(service: Service) -> None:
    """Though each engine has as little to do as the other, and whichever was first."""
    homes: list[set[str]] = []
    for instructions in INSTRUCTIONS:
        # The other engine has something to do at this moment: so this one has the instructions.
        busy = asyncio.create_task(generate(service.router, "word " * 300, max_tokens=1))
        await asyncio.sleep(0)
        homes.append({(await course_of(service, instructions)).engine})
        await busy
    before = await service.hits()
    fetched = 0
    for question in QUESTIONS:
        for home, instructions in zip(homes, INSTRUCTIONS, strict=True):
            course = await course_of(service, instructions + question)
            assert course.engine in home or course.fetched
            home.add(course.engine)
            fetched += course.fetched
    assert service.router.pools.fleet.known.num_gaps == 0, "nothing was lost, so nothing is doubted"
    gained = sum(await service.hits()) - sum(before)
    common = [
        len(service.router.renderer.render_prompt(text)["prompt_token_ids"])
        for text in INSTRUCTIONS
    ]
    assert gained + fetched >= len(QUESTIONS) * (sum(common) - 2 * 16 * len(common))


async def test_another_salt_is_another_prompt(service: Service) -> None:
    prompt: PromptType = {"prompt": INSTRUCTIONS[0] + QUESTIONS[0], "cache_salt": "pepper"}
    before = await service.hits()
    first = await course_of(service, prompt)
    assert await service.hits() == before
    assert not first.fetched
    second = await course_of(service, prompt)
    assert second.engine == first.engine or second.fetched
    assert second.fetched or sum(await service.hits()) > sum(before)


async def test_engines_of_one_machine_are_known_to_share_its_processors(service: Service) -> None:
    rows = [link.row for role in ROLES for link in service.router.pools.of(role)]
    assert {row["processors"] for row in rows} == {processors_in_common()}
    assert all(0 < row["processors_part"] <= 1 for row in rows)


async def test_a_router_that_comes_later_is_told_everything(
    service: Service, smollm2: str, eventually: Any
) -> None:
    later = make_router(
        smollm2,
        *service.addresses,
        lambda: [service.keys],
        policy="prefix_aware",
        disaggregate="always",
    )
    later.start()
    try:
        await healthy(later)

        async def knows_as_much() -> bool:
            return remembered_blocks(later) == remembered_blocks(service.router) > 0

        await eventually(knows_as_much)
    finally:
        later.shutdown()


def extended_hashes(token_ids: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, 16, None)
    return hashes


def known_to_be_remembered(service: Service, prompt: str) -> set[int]:
    """How much of a prompt, in blocks, the router takes some engine to remember."""
    pools = service.router.pools
    links = [link for role in ROLES for link in pools.of(role)]
    assert len(links) == 3
    description = links[0].description
    assert description is not None
    token_ids = service.router.renderer.render_prompt(prompt)["prompt_token_ids"]
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, description.block_size, None)
    return {pools.fleet.known.num_cached(link.key, keys_of(hashes)) for link in links}


async def test_a_prompt_goes_where_its_beginning_is_on_disk_and_is_read_there(
    smollm2: str, keys_dir: Path, eventually: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = {"num_blocks": 48, "max_model_len": 512}
    configs = (
        engine_config("on-disk", smollm2, **small, kv_disk_bytes=1 << 30),
        engine_config("blank", smollm2, **small),
        engine_config("forgetful", smollm2, **small, enable_prefix_caching=False),
    )
    started = await asyncio.gather(*(start_engine(config, keys_dir) for config in configs))
    [(engine, at), (blank, at_b), (forgetful, at_d)] = started
    keys = read_keys(keys_dir)
    router = make_router(
        smollm2, f"{at},{at_b}", at_d, lambda: [keys], policy="prefix_aware", disaggregate="always"
    )
    prompts = [f"{number} " + "word " * 300 for number in range(4)]
    tokens = [router.renderer.render_prompt(prompt)["prompt_token_ids"] for prompt in prompts]
    stored = (len(tokens[0]) - 1) // 16 * 16

    async def are_on_disk(count: int) -> bool:
        return (await engine.refresh_stats()).disk_blocks >= count

    names = keys_of(extended_hashes(tokens[0][:-1]))
    pools = router.pools

    def known(stored: bool) -> list[int]:
        """How many blocks of the first prompt each prefill engine has, by what the router knows."""
        links = [link for link in pools.of("prefill") if pools.usable(link)]
        return sorted(pools.fleet.known.num_cached(x.key, names, stored=stored) for x in links)

    router.start()
    try:
        await healthy(router)
        await eventually(lambda: len(known(False)) == 2)
        for number, ids in enumerate(tokens, 1):  # by the end memory has no room for the first
            await generate(engine, {"prompt_token_ids": ids}, max_tokens=1)
            await eventually(partial(are_on_disk, number * stored // 16))
        expected = await generate(blank, {"prompt_token_ids": tokens[0]}, max_tokens=8)
        await eventually(blank.reset_prefix_cache)
        await eventually(lambda: (known(False), known(True)) == ([0, 0], [0, stored // 16]))
        read = (await engine.refresh_stats()).disk_tokens
        computed = (await engine.refresh_stats()).prompt_tokens_computed
        ahead = await generate(router, prompts[0], pin_s=300, prefetches=True)
        assert ahead.metrics["prefill"] == "on-disk"
        assert ahead.num_cached_tokens == stored
        assert ahead.outputs[0].token_ids == []
        assert (await engine.refresh_stats()).prompt_tokens_computed == computed
        read += stored
        assert (await engine.refresh_stats()).disk_tokens == read
        record = next(iter(router.table.records))
        assert record.outcome == "prefetched"
        chosen = record.attempts[0].decision
        assert chosen.terms["read_s"] > 0
        assert chosen.prefill is not None
        reader = pools.links[chosen.prefill]
        await eventually(lambda: reader.row["told_reads"] > 0)
        for prompt in prompts[2:]:  # others have their memory, but for what is pinned
            await generate(router, prompt, max_tokens=1)
        others = (await engine.refresh_stats()).disk_tokens
        answer = await generate(router, prompts[0], max_tokens=8)
        assert answer.metrics["prefill"] == "on-disk"
        assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
        assert answer.num_cached_tokens == stored
        assert (await engine.refresh_stats()).disk_tokens == others, "nothing had to be read"
    finally:
        router.shutdown()
        for each in (engine, blank, forgetful):
            each.shutdown()


async def test_what_engines_forget_the_router_forgets(service: Service, eventually: Any) -> None:
    """A canary that comes afterwards, as on a machine so busy that an engine seems to fail, is
    remembered like any request, and nothing else is."""
    pools = service.router.pools
    instructions = INSTRUCTIONS[0]
    await generate(service.router, instructions, max_tokens=1)
    await eventually(lambda: max(known_to_be_remembered(service, instructions)) > 0)
    pools.fleet.known.index.age()
    pools.fleet.known.index.age()  # what was sent a moment ago counts no more
    for engine in (*service.prefill, service.decode):
        await eventually(engine.reset_prefix_cache)  # once nothing is lent any more
    report = await run_canary(pools.of("prefill")[0], pools.of("decode")[0], pools.release)
    assert report.ok, report.error
    await eventually(lambda: known_to_be_remembered(service, instructions) == {0})
    await eventually(lambda: 0 < remembered_blocks(service.router) <= 3 * report.prompt_tokens)
    assert pools.fleet.known.num_gaps == 0
