"""Cores come and go under traffic, and no request is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from diptych_frontend.admin.calls import build_admin_app
from diptych_frontend.admin.control import ControlRoutes
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import (
    EngineConfig,
    EngineDeadError,
    InvalidRequestError,
    KVTransferConfig,
    ReconfigureDistributedRequest,
    ReconfigureRankType,
    SamplingParams,
    StreamingInput,
    UtilityError,
)
from diptych_protocol.admin import ADMIN_TOKEN_FILE

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = EngineConfig(
    model="dummy://?num_hidden_layers=2",
    engine_id="pod",
    num_blocks=512,
    num_threads=1,
    max_num_batched_tokens=64,
)
LENGTH = 400
SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[AsyncLLM]:
    engine = await AsyncLLM.start(CONFIG)
    yield engine
    engine.shutdown()


async def read(engine: AsyncLLM, name: str, length: int = LENGTH) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    prompt = [ord(letter) for letter in name]
    async for output in engine.generate(prompt, params, name):
        if output.finished:
            return output.outputs[0].token_ids
    raise AssertionError("a stream without an end")


async def pieces_until(asked: asyncio.Event) -> AsyncGenerator[StreamingInput, None]:
    yield StreamingInput([1, 2, 3])
    await asked.wait()


async def test_contract_C23_M10_growing_and_shrinking_under_traffic_loses_no_request(
    engine: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    expected = {name: await read(engine, name) for name in ("a", "b", "c")}
    results: list[bool] = []
    going = True

    async def caller(name: str) -> None:
        while going:
            results.append(await read(engine, name) == expected[name])

    callers = [asyncio.create_task(caller(name)) for name in expected for _ in range(2)]
    await engine.scale_elastic_ep(2)
    assert len(engine.stats_by_engine()) == 2
    [stays, leaves] = engine._cores.members
    while not leaves.open:  # the new core has its share
        await asyncio.sleep(0)
    asked = asyncio.Event()
    in_pieces = engine.generate(pieces_until(asked), SHORT, "in pieces", data_parallel_rank=1)
    await anext(in_pieces)
    await engine.scale_elastic_ep(1, drain_timeout=0)
    assert leaves.process.ended() is not None
    assert leaves.process.process.returncode == 0  # type: ignore[attr-defined]
    assert "does not leave by itself" not in caplog.text, "a core that is told to end exits 0, too"
    assert engine._cores.members == [stays]
    going = False
    await asyncio.gather(*callers)
    assert len(results) >= len(callers)
    assert all(results), "moved requests say what they would have said"
    assert leaves.open == {}
    asked.set()
    reasons = [output.outputs[0].finish_reason async for output in in_pieces]
    assert reasons[-1] == "abort", "its earlier pieces were nowhere else"


async def test_requests_may_end_where_they_are_before_a_core_leaves(engine: AsyncLLM) -> None:
    await engine.scale_elastic_ep(2)
    [_, leaves] = engine._cores.members
    answers = [asyncio.create_task(read(engine, name)) for name in "wxyz"]
    while len(leaves.open) < 2:
        await asyncio.sleep(0)
    await engine.scale_elastic_ep(1, drain_timeout=60)
    assert sum(task.done() for task in answers) >= 2
    assert [len(answer) for answer in await asyncio.gather(*answers)] == [LENGTH] * 4
    assert leaves.stats.tokens_generated == 2 * LENGTH, "nothing was computed twice"
    assert not engine.errored


async def test_contract_M09_a_reconfiguration_makes_the_round_trip(engine: AsyncLLM) -> None:
    request = ReconfigureDistributedRequest(1, ReconfigureRankType.KEEP_CURRENT_RANK, -1, "", 0)
    raw = msgspec.to_builtins(request)
    assert msgspec.convert(raw, ReconfigureDistributedRequest) == request
    [member] = engine._cores.members
    assert await member.client.call("reinitialize_distributed", request) is None
    for bad in ({**raw, "new_data_parallel_size": 0}, {**raw, "new_data_parallel_rank": 5}, {}, 3):
        with pytest.raises(UtilityError, match="reinitialize_distributed"):
            await member.client.call("reinitialize_distributed", bad)
    assert len(await read(engine, "still here", 3)) == 3


async def test_a_core_that_does_not_start_changes_nothing(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = msgspec.structs.replace(CONFIG, model="/no/such/model.gguf")
    monkeypatch.setattr(engine._cores, "_config", broken)
    with pytest.raises(EngineDeadError, match="exited with code 2"):
        await engine.scale_elastic_ep(2)
    assert not engine.errored
    assert len(engine.stats_by_engine()) == 1
    assert len(await read(engine, "as before", 3)) == 3


@pytest.mark.parametrize("size", [0, -1, 65])
async def test_an_impossible_number_of_cores_is_refused(engine: AsyncLLM, size: int) -> None:
    with pytest.raises(InvalidRequestError, match="between 1 and 64") as refusal:
        await engine.scale_elastic_ep(size)
    assert refusal.value.param == "new_data_parallel_size"


async def test_a_paused_engine_does_not_grow(engine: AsyncLLM) -> None:
    await engine.pause_generation(mode="keep")
    with pytest.raises(InvalidRequestError, match="paused"):
        await engine.scale_elastic_ep(2)
    await engine.resume_generation()
    assert len(engine._cores.members) == 1


async def test_an_engine_with_a_hinge_keeps_its_core() -> None:
    with pytest.raises(InvalidRequestError, match="hand-offs"):
        AsyncLLM(
            msgspec.structs.replace(CONFIG, data_parallel_size=2, kv_transfer=KVTransferConfig())
        )


@pytest.mark.parametrize(
    ("body", "status", "answer"),
    [
        ({"new_data_parallel_size": 1}, 200, '{"data_parallel_size":1}'),
        ({"new_data_parallel_size": 0}, 400, "between 1 and 64"),
        ({"new_data_parallel_size": 2, "drain_timeout": -1}, 400, "drain_timeout"),
        ({}, 400, "new_data_parallel_size"),
    ],
)
async def test_contract_C23_the_number_of_cores_can_be_set_on_the_admin_port(
    engine: AsyncLLM, tmp_path: Path, body: dict[str, Any], status: int, answer: str
) -> None:
    (tmp_path / ADMIN_TOKEN_FILE).write_text("secret")
    app = build_admin_app(tmp_path, ControlRoutes(engine).routes())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as http:
        response = await http.post(
            "/admin/scale_elastic_ep", json=body, headers={"authorization": "Bearer secret"}
        )
    assert response.status_code == status
    assert answer in response.text
