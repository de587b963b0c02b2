"""Cores come and go under traffic of the real model, whose answers differ: row C23."""

from __future__ import annotations

import asyncio

import pytest
from engine_kit.mq import REAL, client_of, running
from model_kit.questions import COUNTING, FACT

from diptych_engine import AsyncLLM
from diptych_protocol import InvalidRequestError, SamplingParams

PROMPTS = (COUNTING.words, FACT.words, "Once upon a time", "def main():")
LENGTH = 8


async def read(engine: AsyncLLM, prompt: str, request_id: str) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    tokens: list[int] = []
    async for output in engine.generate(prompt, params, request_id):
        tokens = output.outputs[0].token_ids
    return tokens


async def test_contract_C23_growing_and_shrinking_changes_no_answer() -> None:
    engine = await AsyncLLM.start(REAL)
    expected = {prompt: await read(engine, prompt, "alone") for prompt in PROMPTS}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(PROMPTS)
    going = True
    answers: list[tuple[str, list[int]]] = []

    async def caller(prompt: str) -> None:
        while going:
            answers.append((prompt, await read(engine, prompt, f"r{len(answers)}")))

    callers = [asyncio.create_task(caller(prompt)) for prompt in PROMPTS]
    await engine.scale_elastic_ep(2)
    [_, leaves] = engine._cores.members
    while not leaves.open:  # the new core has its share
        await asyncio.sleep(0.01)
    during = len(answers)
    await engine.scale_elastic_ep(1, drain_timeout=0)
    assert leaves.process.ended() is not None
    going = False
    await asyncio.gather(*callers)
    assert len(answers) > during
    assert {prompt for prompt, _ in answers} == set(PROMPTS)
    assert all(tokens == expected[prompt] for prompt, tokens in answers), "none is lost or changed"
    engine.shutdown()


async def test_contract_C23_a_client_that_owns_no_core_adds_none() -> None:
    with running(REAL) as core:
        client = client_of(core)
        await client.setup()
        with pytest.raises(InvalidRequestError, match="started by somebody else"):
            await client.scale_elastic_ep(2)
        assert len(await read(client, FACT.words, "r")) == LENGTH
        client.close()
