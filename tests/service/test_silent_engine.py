"""An engine whose loop hangs, while its socket lives on, loses its work to others: real engines."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest_asyncio
from engine_kit.executor import PACED
from engine_kit.wire import request
from service_kit import (
    LIGHT,
    Core,
    Streaming,
    all_usable,
    cores,
    engine_config,
    generate,
    link_of,
    routing,
)

from diptych_router.choosing.fleet_table import FOR_A_PAIR
from diptych_router.engines.engine_link import EngineLink
from diptych_router.requests.pool_client import PoolClient

HANG = "engine_kit.logits_processors:hang"
PROMPT = "The lighthouse keeper climbed the stairs, and"


@dataclass
class Service:
    """One prefill engine, and two decode engines."""

    client: PoolClient
    decode: list[Core]

    def links(self) -> tuple[EngineLink, EngineLink]:
        one, other = (link_of(self.client, core) for core in self.decode)
        return one, other

    async def stream_at_first(self, max_tokens: int) -> Streaming:
        """A stream that the first decode engine decodes."""
        _, other = self.links()
        other.row["open_tokens"] += 1_000_000
        stream = Streaming(self.client, PROMPT, max_tokens)
        try:
            async with asyncio.timeout(60.0):
                while len(stream.token_ids) < 3:
                    await asyncio.sleep(0.01)
        finally:
            other.row["open_tokens"] -= 1_000_000
        return stream


@pytest_asyncio.fixture
async def service(smollm2: str, keys_dir: Path) -> AsyncIterator[Service]:
    configs = [
        engine_config(name, LIGHT, logits_processors=[HANG], executor_class=PACED)
        for name in ("prefill-0", "decode-0", "decode-1")
    ]
    with cores(keys_dir, *configs) as (prefill, *decode):
        addresses = [core.address for core in decode]
        async with routing(smollm2, keys_dir, [prefill.address], addresses) as client:
            await all_usable(client, 3)
            yield Service(client, decode)


async def test_streams_of_an_engine_that_hangs_in_a_step_go_on_elsewhere(
    service: Service, eventually: Any
) -> None:
    hanging, other = service.links()
    whole = (await generate(service.client, PROMPT, max_tokens=80, ignore_eos=True)).outputs[0]
    stream = await service.stream_at_first(80)
    culprit = request("culprit", [1, 2, 3], max_tokens=50, logits_processors=[HANG])
    in_vain = asyncio.create_task(hanging.complete(culprit))
    await eventually(lambda: hanging.silent)
    assert hanging.up
    assert await stream.done() == whole.token_ids
    assert pair_of(await generate(service.client, "Who answers?")) == other.name
    # Alone it is better than nobody.
    other.listed = False
    decision = service.client.pools.choose(FOR_A_PAIR)
    assert decision is not None
    assert decision.decode == hanging.key
    in_vain.cancel()


async def test_an_engine_that_goes_on_is_taken_in_again(service: Service, eventually: Any) -> None:
    stopped, other = service.links()
    service.decode[0].signal(signal.SIGSTOP)
    try:
        # It is silent, or lost already if this process was slow to look.
        await eventually(lambda: not service.client.pools.may_begin_at(stopped.key))
        assert pair_of(await generate(service.client, "Who answers?")) == other.name
    finally:
        service.decode[0].signal(signal.SIGCONT)
    await eventually(lambda: service.client.pools.may_begin_at(stopped.key))
    stream = await service.stream_at_first(8)
    await stream.done()
    assert stopped.times_up in (1, 2)


def pair_of(output: Any) -> str:
    return str(output.metrics["decode"])
