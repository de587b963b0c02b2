"""Several engine cores behind one AsyncLLM: real processes, a random model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import httpx
import pytest
import pytest_asyncio
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import (
    EngineConfig,
    InvalidRequestError,
    SamplingParams,
    SchedulerStats,
    StreamingInput,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = EngineConfig(
    model="dummy://?num_hidden_layers=2",
    engine_id="pod",
    num_blocks=256,
    num_threads=1,
    max_num_batched_tokens=64,
    data_parallel_size=2,
)
PROMPT = [1, 2, 3]
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[AsyncLLM]:
    engine = await AsyncLLM.start(CONFIG)
    yield engine
    engine.shutdown()


async def read(
    engine: AsyncLLM, name: str, params: SamplingParams = LONG, rank: int | None = None
) -> list[int]:
    tokens: list[int] = []
    async for output in engine.generate(PROMPT, params, name, data_parallel_rank=rank):
        tokens = output.outputs[0].token_ids
    return tokens


async def stats(engine: AsyncLLM) -> list[SchedulerStats]:
    await engine.refresh_stats()
    return list(engine.stats_by_engine().values())


async def tokens_made(engine: AsyncLLM) -> list[int]:
    return [core.tokens_generated for core in await stats(engine)]


async def test_requests_are_spread_over_the_cores_and_answered_alike(engine: AsyncLLM) -> None:
    before = await tokens_made(engine)
    answers = await asyncio.gather(*(read(engine, f"r{i}") for i in range(6)))
    assert all(answer == answers[0] for answer in answers), "every core has the same weights"
    made = [now - then for now, then in zip(await tokens_made(engine), before, strict=True)]
    assert made == [900, 900]
    assert list(engine.stats_by_engine()) == ["pod-0", "pod-1"]


@pytest.mark.parametrize("rank", [0, 1])
async def test_contract_B11_a_request_goes_to_the_rank_it_names(
    engine: AsyncLLM, rank: int
) -> None:
    before = await tokens_made(engine)
    short = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    await asyncio.gather(*(read(engine, f"p{i}", short, rank) for i in range(3)))
    made = [now - then for now, then in zip(await tokens_made(engine), before, strict=True)]
    assert made == ([15, 0] if rank == 0 else [0, 15])


@pytest.mark.parametrize("rank", [-1, 2, 1000])
async def test_contract_B11_a_rank_that_does_not_exist_is_an_error(
    engine: AsyncLLM, rank: int
) -> None:
    with pytest.raises(InvalidRequestError, match="data_parallel_rank") as refusal:
        await read(engine, "nowhere", rank=rank)
    assert refusal.value.param == "data_parallel_rank"


async def test_contract_B11_an_abort_goes_to_the_rank_that_has_the_request(
    engine: AsyncLLM,
) -> None:
    stream = engine.generate(PROMPT, LONG, "leaves", data_parallel_rank=1)
    await anext(stream)
    assert [s.num_running for s in await stats(engine)] == [0, 1]
    await engine.abort("leaves")
    assert [output.outputs[0].finish_reason async for output in stream][-1] == "abort"
    async with asyncio.timeout(PATIENCE_S):
        while any(s.num_running for s in await stats(engine)):
            await asyncio.sleep(0)
    assert all(s.blocks_free == s.blocks_total for s in await stats(engine))


async def test_the_pieces_of_a_prompt_go_to_the_same_core(engine: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)

    async def pieces() -> AsyncGenerator[StreamingInput, None]:
        for piece in ([1, 2, 3], [4, 5], [6]):
            yield StreamingInput(piece)
            # Now the other core has less to do.
            others.append(asyncio.create_task(read(engine, f"other-{len(others)}", rank=0)))

    others: list[asyncio.Task[list[int]]] = []
    before = await tokens_made(engine)
    told = engine.generate(pieces(), params, "pieces", data_parallel_rank=1)
    async for output in told:
        assert output.outputs[0].finish_reason != "error"
    await asyncio.gather(*others)
    assert [now - then for now, then in zip(await tokens_made(engine), before, strict=True)] == [
        900, 9,
    ]  # fmt: skip


async def test_what_one_core_is_asked_all_are(engine: AsyncLLM) -> None:
    stream = engine.generate(PROMPT, LONG, "holds", data_parallel_rank=1)
    await anext(stream)
    assert await engine.reset_prefix_cache() is False, "the second core has blocks in use"
    await stream.aclose()
    report = await engine.drain_report()
    assert report.draining is False


@pytest.mark.parametrize(
    ("header", "status", "made_by"),
    [("1", 200, 1), ("0", 200, 0), ("2", 400, None), ("-1", 400, None), ("one", 400, None)],
)
async def test_contract_B11_the_rank_may_stand_in_a_header(
    engine: AsyncLLM, header: str, status: int, made_by: int | None
) -> None:
    before = await tokens_made(engine)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(build_app(engine)), base_url="http://engine"
    ) as http:
        answer = await http.post(
            "/v1/completions",
            json={
                "model": engine.model_name,
                "prompt": PROMPT,
                "max_tokens": 4,
                "ignore_eos": True,
            },
            headers={"X-data-parallel-rank": header},
        )
    assert answer.status_code == status, answer.text
    if made_by is None:
        assert answer.json()["error"]["param"] == "data_parallel_rank"
    else:
        assert (await tokens_made(engine))[made_by] - before[made_by] == 4
