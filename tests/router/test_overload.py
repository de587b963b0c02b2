"""Engines that have no room: others are tried, and then the client is told to come back later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from service_kit import Streaming, engine_config, generate, healthy, routing, start_engine
from waits import FOR_EVER_S, PATIENCE_S

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.curve import new_keys
from diptych_protocol import EngineOverloadedError, RequestOutput
from diptych_router.choosing.fleet_table import FOR_A_PAIR
from diptych_router.choosing.policy import Decision
from diptych_router.engines import health_book

PROMPT = "The lighthouse keeper climbed the stairs every evening, and "
Engine = tuple[AsyncLLM, str]
"""A client of its own, past the router, and host:port."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def keys_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    keys = new_keys()
    (folder / "curve-public").write_text(keys.public)
    (folder / "curve-secret").write_text(keys.secret)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(smollm2: str, keys_dir: Path) -> AsyncIterator[dict[str, Engine]]:
    """Each works on one request while another waits, and then has no room."""
    names = ("prefill-0", "prefill-1", "decode-0")
    started = await asyncio.gather(
        *(
            start_engine(engine_config(name, smollm2, max_num_seqs=1, max_num_waiting=1), keys_dir)
            for name in names
        )
    )
    yield dict(zip(names, started, strict=True))
    for engine, _ in started:
        engine.shutdown()


@asynccontextmanager
async def full(engine: AsyncLLM) -> AsyncIterator[None]:
    """Somebody else keeps the engine busy."""
    others: list[asyncio.Task[RequestOutput]] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            for waiting in range(2):
                endless = generate(engine, PROMPT, max_tokens=3000, ignore_eos=True)
                others.append(asyncio.create_task(endless))
                while await load(engine) != (1, waiting):
                    await asyncio.sleep(0.02)
        yield
    finally:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def load(engine: AsyncLLM) -> tuple[int, int]:
    stats = await engine.refresh_stats()
    return stats.num_running, stats.num_waiting


async def test_when_every_prefill_engine_is_full_the_client_is_told_to_come_back(
    smollm2: str, keys_dir: Path, engines: dict[str, Engine]
) -> None:
    """The decode engine has room, but prompts are not its business."""
    (prefill, at_p), (_, at_d) = engines["prefill-0"], engines["decode-0"]
    async with routing(smollm2, keys_dir, [at_p], [at_d]) as client:
        await healthy(client)
        async with full(prefill):
            with pytest.raises(EngineOverloadedError, match="no other engine has room"):
                await generate(client, PROMPT)
        output = await generate(client, PROMPT)
    assert len(output.outputs[0].token_ids) == 16


async def test_another_engine_is_tried_before_and_the_full_one_is_spared_until_it_has_room(
    smollm2: str,
    keys_dir: Path,
    engines: dict[str, Engine],
    eventually: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health_book, "REMEMBERED_S", FOR_EVER_S)
    (busy, at_busy), (_, at_free), (_, at_d) = engines.values()
    async with routing(smollm2, keys_dir, [at_busy, at_free], [at_d], verify="Warn") as client:
        await healthy(client)
        await eventually(lambda: len(client.pools.of("prefill")) == 2)
        links = {link.name: link for link in client.pools.of("prefill")}
        # A canary under way would take the decode engine's only place.
        await eventually(lambda: all(map(client.pools.verified, client.pools.links.values())))
        async with full(busy):
            links["prefill-1"].row["open_tokens"] += 1000  # so that the busy one is asked first
            outputs = [await generate(client, PROMPT) for _ in range(2)]
        ways = [(x.metrics["prefill"], x.metrics["attempts"]) for x in outputs]
        assert ways == [("prefill-1", 2), ("prefill-1", 1)]
        await eventually(
            lambda: prefill_of(client.pools.choose(FOR_A_PAIR)) == links["prefill-0"].key
        )


def prefill_of(decision: Decision | None) -> str | None:
    return None if decision is None else decision.prefill


async def test_a_stream_that_has_begun_waits_for_room_in_the_decode_pool(
    smollm2: str, keys_dir: Path, engines: dict[str, Engine], eventually: Any
) -> None:
    (_, at_p), (decode, at_d) = engines["prefill-1"], engines["decode-0"]
    async with routing(smollm2, keys_dir, [at_p], [at_d]) as client:
        await healthy(client)
        async with full(decode):
            stream = Streaming(client, PROMPT, max_tokens=20)
            await eventually(lambda: client.num_held == 1)
            assert stream.token_ids
        assert len(await stream.done()) == 20
