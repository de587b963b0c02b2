"""No room is said before an answer begins: row B18. And Q19: no priority without its policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio
from engine_kit.core import CLIENT, DUMMY, core_request, make_core

from diptych_frontend.app import build_app
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.text.output_processor import Collector, OutputProcessor
from diptych_protocol import (
    EngineConfig,
    EngineCoreOutput,
    EngineGenerateError,
    EngineOverloadedError,
    FinishReason,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
)
from diptych_protocol.wire import ErrorKind

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = f"{DUMMY}&max_position_embeddings=65536"
ENDLESS = 60_000
CONFIG = EngineConfig(
    MODEL, num_blocks=8192, num_threads=1, max_num_seqs=1, max_num_waiting=3, max_waiting_tokens=20
)
Eventually = Callable[..., Awaitable[Any]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[AsyncLLM]:
    engine = await AsyncLLM.start(CONFIG)
    yield engine
    engine.shutdown()


@asynccontextmanager
async def open_requests(engine: AsyncLLM, *prompts: list[int]) -> AsyncIterator[None]:
    """Requests that do not end by themselves; the first one has begun to run."""
    params = SamplingParams(max_tokens=ENDLESS, ignore_eos=True)
    begun = asyncio.Event()

    async def read(index: int, prompt: list[int]) -> None:
        async for _ in engine.generate(prompt, params, f"open-{index}"):
            begun.set()

    tasks = [asyncio.create_task(read(0, prompts[0]))]
    await begun.wait()
    tasks += [asyncio.create_task(read(i, prompt)) for i, prompt in enumerate(prompts[1:], 1)]
    await asyncio.sleep(0)  # they begin
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def post(engine: AsyncLLM, prompt: Any, **fields: Any) -> httpx.Response:
    body = {"model": engine.model_name, "prompt": prompt, "max_tokens": 1, **fields}
    transport = httpx.ASGITransport(build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post("/v1/completions", json=body)


@pytest.mark.parametrize("stream", [False, True])
async def test_contract_B18_the_fifth_of_four_gets_503_before_any_header(
    engine: AsyncLLM, eventually: Eventually, stream: bool
) -> None:
    async with open_requests(engine, [1], [2], [3], [4]):
        with pytest.raises(EngineOverloadedError, match="4 requests are open"):
            engine.check_admission(1)
        refused = await post(engine, [5], stream=stream)
        assert refused.status_code == 503
        assert refused.headers["content-type"] == "application/json"
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "overloaded"
    engine.check_admission(4)
    served = await post(engine, [5], stream=stream)
    assert served.status_code == 200


@pytest.mark.parametrize(
    "wanted", [{"prompt": [[1], [2], [3], [4], [5]]}, {"prompt": [1], "n": 5, "temperature": 1.0}]
)
async def test_contract_B18_a_request_for_too_much_at_once_is_refused_as_a_whole(
    engine: AsyncLLM, wanted: dict[str, Any]
) -> None:
    refused = await post(engine, stream=True, **wanted)
    assert refused.status_code == 503


async def test_contract_B18_waiting_prompt_tokens_are_bounded(engine: AsyncLLM) -> None:
    async with open_requests(engine, [1] * 50, [2] * 15):
        # The first has begun: only the second one's tokens wait.
        assert (await post(engine, [3] * 6)).status_code == 503
        with pytest.raises(EngineOverloadedError, match="15 prompt tokens wait already"):
            engine.check_admission(1, num_tokens=6)
        engine.check_admission(1, num_tokens=5)
    assert (await post(engine, [4] * 30)).status_code == 200, "alone, it may be longer"


async def test_contract_Q19_a_priority_is_refused_by_name_where_nobody_looks_at_it(
    engine: AsyncLLM,
) -> None:
    refused = await post(engine, [1], priority=3)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"
    assert "scheduling_policy" in refused.json()["error"]["message"]
    assert (await post(engine, [1], priority=0)).status_code == 200


async def test_contract_B18_a_core_without_room_says_so_before_it_begins() -> None:
    core = make_core(max_num_waiting=1)
    core.add(core_request("first", [1]), CLIENT)
    core.add(core_request("second", [1]), CLIENT)
    ((output,),) = core.take_outputs().values()
    assert output.request_id == "second"
    assert output.error_kind is ErrorKind.OVERLOADED
    assert "too many" in str(output.error)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (ErrorKind.OVERLOADED, EngineOverloadedError),
        (ErrorKind.FAULT, EngineGenerateError),
    ],
)
async def test_contract_B18_a_refusal_by_the_core_is_told_from_a_failure(
    kind: ErrorKind, error: type[Exception]
) -> None:
    outputs, collector = OutputProcessor(None), Collector[RequestOutput](["r"])
    outputs.add(core_request("r", [1, 2, 3]), None, collector)
    assert outputs.num_waiting_tokens == 3
    failed = EngineCoreOutput("r", [], finish_reason=FinishReason.ERROR, error="x", error_kind=kind)
    outputs.process([failed])
    with pytest.raises(error):
        await collector.get()
    assert outputs.num_waiting_tokens == 0


async def test_contract_B18_the_limit_must_be_a_number_of_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="max_waiting_tokens"):
        EngineConfig(MODEL, max_waiting_tokens=0).check()
