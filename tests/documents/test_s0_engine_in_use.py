"""The first document in use: what its callers see of an engine beside names and parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from diptych_engine import AsyncLLM, EngineArgs, LLMEngine
from diptych_protocol import InvalidRequestError, PoolingParams, SamplingParams

EngineDeadError: Any = import_module("diptych_engine.as_vllm.v1.engine.exceptions").EngineDeadError
ARGS = EngineArgs("dummy://", num_blocks=64, max_model_len=256)
NO_DICT: Any = 7
QUESTIONS = (
    "check_health", "start_profile", "stop_profile", "reset_mm_cache", "reset_encoder_cache",
    "reset_prefix_cache", "sleep", "wake_up", "is_sleeping", "pause_generation",
    "resume_generation", "is_paused", "get_supported_tasks", "finish_weight_update",
)  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_engine_args(ARGS)
    yield engine
    engine.shutdown()


async def answers(engine: AsyncLLM, request_id: str) -> list[Any]:
    """Options may be given by position, in the document's order."""
    params, pooling = SamplingParams(max_tokens=2), PoolingParams()
    found: list[Any] = [each async for each in engine.generate([1, 2, 3], params, request_id)]
    with refusing("tokenization_kwargs"):
        await engine.add_request(request_id, [1], params, None, None, NO_DICT)
    with refusing("tokenization_kwargs"):
        await anext(engine.encode([1], pooling, request_id, None, None, 0, NO_DICT))
    vectors = engine.encode([1, 2, 3], pooling, request_id, None, None, 0, None, None)
    return [*found, *[each async for each in vectors]]


@contextmanager
def refusing(param: str) -> Iterator[None]:
    with pytest.raises(InvalidRequestError) as caught:
        yield
    assert caught.value.param == param


def test_requests_end_to_end(engine: AsyncLLM) -> None:
    """An empty id is an id; a vector is an array to NumPy; a loop is for good."""
    *_, vector = found = asyncio.run(answers(engine, ""))
    assert {answer.request_id for answer in found} == {""}
    as_array = np.asarray(vector.outputs.data)
    assert as_array.dtype == np.float32
    assert as_array.tolist() == vector.outputs.data.tolist()
    for call in (answers(engine, "again"), engine.is_paused(), engine.ready()):
        with pytest.raises(EngineDeadError, match=r"one asyncio\.run, or make an engine in each"):
            asyncio.run(call)
    assert not engine.errored


def test_ids_and_options_are_the_same_with_the_synchronous_engine() -> None:
    engine = LLMEngine.from_engine_args(ARGS)
    params = SamplingParams(max_tokens=2)
    with refusing("tokenization_kwargs"):
        engine.add_request("", [1], params, None, None, NO_DICT)
    with refusing("prompt_text"):
        engine.add_request("", [1], params, None, None, None, None, 0, NO_DICT)
    with pytest.raises(TypeError, match="data_parallel_rank"):
        engine.add_request("", [1], params, data_parallel_rank=0)  # type: ignore[call-arg]
    engine.add_request("", [1, 2, 3], params)
    shown = set()
    while engine.has_unfinished_requests():
        shown |= {output.request_id for output in engine.step()}
    engine.shutdown()
    assert shown == {""}


async def test_after_its_end_every_call_says_that_the_engine_is_dead() -> None:
    engine = AsyncLLM.from_engine_args(ARGS)
    engine.shutdown()
    calls: list[Coroutine[Any, Any, Any]] = [getattr(engine, name)() for name in QUESTIONS]
    for call in (*calls, answers(engine, "late"), engine.collective_rpc("memory")):
        with pytest.raises(EngineDeadError):
            await call
