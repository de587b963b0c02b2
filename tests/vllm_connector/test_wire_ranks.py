"""Real vLLM servers of several ranks that answer the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from free_ports import first_of_free_ports
from model_kit.sensitive_model import ANSWER_TOKENS, Question, questions
from vllm_kit.adapters import LORA, adapter_in, model_with
from vllm_kit.environment import START_S, needs_vllm
from vllm_kit.wired import Wired, handed_over, sent, started_servers, tokens_of, wired
from vllm_server import VllmServer, connector_config, save_model_for_vllm

from diptych_protocol import LoRARequest, fingerprint

pytestmark = [*needs_vllm, pytest.mark.slow, pytest.mark.timeout(START_S + 900)]

Eventually = Callable[[Callable[[], Any]], Awaitable[None]]
BLOCKS = 512
RANKS = (2, 1)
CORES = ("--data-parallel-size", "2", "--api-server-count", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_for_vllm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def asked(model: str) -> list[Question]:
    return questions(model, 12, shortest=70, longest=600)


@pytest.fixture
def shared(model: str, tmp_path: Path) -> Iterator[list[tuple[VllmServer, int]]]:
    """P of two ranks, and D of one."""
    transfers = [
        connector_config(lease_seconds=900, load_timeout_s=900, listen_port=first_of_free_ports(n))
        for n in RANKS
    ]
    yield from started_servers(model, tmp_path, transfers, *LORA, ranks=RANKS)


async def test_ranks_that_share_layers_answer_as_one_and_hand_over(
    shared: list[tuple[VllmServer, int]], asked: list[Question], tmp_path: Path
) -> None:
    """The machine may have no processor for each rank, so these are few requests."""
    p, d = await wired(shared)
    assert fingerprint(p.about.compat) == fingerprint(d.about.compat)
    for question in asked[:3]:
        assert tokens_of(await p.run(question.prompt, cache_salt="alone")) == question.answer
        answer, received = await handed_over(p, d, question)
        assert (answer, received) == (question.answer, len(question.prompt))
    assert (await p.client.fetch_stats()).blocks_total == p.about.num_blocks == BLOCKS
    adapter = LoRARequest("one", 1, adapter_in(tmp_path / "one", 1))
    [other] = questions(model_with(tmp_path / "merged", adapter.lora_path), 1, shortest=70)
    answer, received = await handed_over(p, d, other, lora_request=adapter)
    assert (answer, received) == (other.answer, len(other.prompt))
    await p.client.call("pause_generation", "keep", False)
    assert await p.client.call("is_paused")
    await p.client.call("resume_generation")
    for each in (p, d):
        assert not each.lost
        each.client.close()


@pytest.fixture(scope="module")
def cores(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[tuple[VllmServer, int]]]:
    folder = tmp_path_factory.mktemp("cores")
    yield from started_servers(model, folder, [None], *CORES, tells_kv=False)


@pytest.fixture
async def engine(cores: list[tuple[VllmServer, int]]) -> AsyncIterator[Wired]:
    [client] = await wired(cores)
    yield client
    assert not client.lost
    client.client.close()


async def test_answers_of_each_core_are_those_of_one_rank(
    engine: Wired, asked: list[Question]
) -> None:
    for rank in (0, 1, None):
        answers = await asyncio.gather(
            *(engine.run(question.prompt, data_parallel_rank=rank) for question in asked)
        )
        assert [tokens_of(answer) for answer in answers] == [x.answer for x in asked]


async def test_load_is_that_of_all_cores(engine: Wired, eventually: Eventually) -> None:
    before = await engine.client.fetch_stats()
    assert engine.about.num_blocks == before.blocks_total == 2 * BLOCKS
    running = [sent([1, 2, 3], max_tokens=900, data_parallel_rank=rank) for rank in (0, 0, 1)]
    for request in running:
        engine.client.add(request)

    async def all_run() -> bool:
        stats = await engine.client.fetch_stats()
        return stats.num_running == 3 and stats.blocks_free < before.blocks_total - 3

    await eventually(all_run)
    engine.client.abort([request.request_id for request in running])

    async def none_runs() -> bool:
        for rank in (0, 1):  # vLLM reports only after a step
            await engine.run([4], max_tokens=1, data_parallel_rank=rank)
        stats = await engine.client.fetch_stats()
        return stats.num_running == 0 and stats.blocks_free == before.blocks_total

    await eventually(none_runs)


async def test_calls_reach_all_cores(engine: Wired, asked: list[Question]) -> None:
    question, client = asked[0], engine.client
    await client.call("pause_generation", "keep", False)
    held = [
        asyncio.create_task(engine.run(question.prompt, data_parallel_rank=rank)) for rank in (0, 1)
    ]
    assert await client.call("is_paused")
    assert (await client.fetch_stats()).paused
    assert not any(task.done() for task in held)
    await client.call("resume_generation")
    for task in held:
        assert tokens_of(await task) == question.answer
    assert not await client.call("is_paused")
    for rank in (0, 1):
        [first, *_] = await engine.run(question.prompt, data_parallel_rank=rank)
        assert first.num_cached_tokens > 0
    assert await client.call("reset_prefix_cache", False, False)
    for rank in (0, 1):
        [first, *_] = await engine.run(question.prompt, data_parallel_rank=rank)
        assert first.num_cached_tokens == 0


async def test_a_core_that_is_not_there_is_refused(engine: Wired) -> None:
    [output] = await engine.run([1, 2, 3], data_parallel_rank=2)
    assert output.error is not None
    assert len(tokens_of(await engine.run([1, 2, 3]))) == ANSWER_TOKENS
