"""What a router makes of priorities, and of prompts in pieces: rows Q19 and B9."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from engine_kit.core import DUMMY
from service_kit import engine_config, healthy, routing, start_engine

from diptych_frontend.core_client.curve import new_keys
from diptych_protocol import InvalidRequestError, RequestOutput, SamplingParams, StreamingInput

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def keys_dir(tmp_path: Path) -> Path:
    keys = new_keys()
    (tmp_path / "curve-public").write_text(keys.public)
    (tmp_path / "curve-secret").write_text(keys.secret)
    return tmp_path


async def final(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    *_, last = [output async for output in outputs]
    return last


async def pieces() -> AsyncGenerator[StreamingInput, None]:
    yield StreamingInput([1])


async def test_contract_Q19_a_router_takes_priorities_if_all_its_engines_look_at_them(
    keys_dir: Path,
) -> None:
    def config(name: str, policy: Any) -> Any:
        return engine_config(name, DUMMY, scheduling_policy=policy)

    started = await asyncio.gather(
        start_engine(config("p", "priority"), keys_dir),
        start_engine(config("d", "priority"), keys_dir),
        start_engine(config("f", "fcfs"), keys_dir),
    )
    (_, at_p), (_, at_d), (_, at_f) = started
    try:
        async with routing(DUMMY, keys_dir, [at_p], [at_d], verify="Off") as client:
            await healthy(client)
            answer = await final(client.generate([1, 2, 3], PARAMS, "r", priority=5))
            assert len(answer.outputs[0].token_ids) == 4
            with pytest.raises(InvalidRequestError, match="in pieces"):
                await final(client.generate(pieces(), PARAMS, "r"))
        async with routing(DUMMY, keys_dir, [at_p], [at_f], verify="Off") as client:
            await healthy(client)
            with pytest.raises(InvalidRequestError, match="scheduling_policy"):
                await final(client.generate([1, 2, 3], PARAMS, "r", priority=5))
            assert (await final(client.generate([1, 2, 3], PARAMS, "r"))).finished
    finally:
        for engine, _ in started:
            engine.shutdown()
