"""Whatever stands in a call, it ends: in an answer, or in an error that says what is wrong.

`DIPTYCH_TEST_CALLS=100000` asks for more than the quick form does; `make chaos` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, Iterator
from itertools import chain
from typing import Any

import httpx
import pytest
from chaos_kit.any_calls import JSON, Call, arguments, calls, may_fail_in_the_engine
from engine_kit.core import DUMMY
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import PATIENCE_S, Deadline

from diptych_engine import AsyncLLM, LLMEngine
from diptych_frontend.app import build_app
from diptych_protocol import (
    EngineConfig,
    EngineGenerateError,
    EngineOverloadedError,
    InvalidRequestError,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    StreamingInput,
)

MANY = int(os.environ.get("DIPTYCH_TEST_CALLS", "0"))
BATCH = 8
"""Calls of one example, which are under way together."""
FORMS = 3
"""In process, over ZMQ, over HTTP: each gets its share of the calls."""
EXAMPLES = settings(max_examples=max(15, -(-MANY // (FORMS * BATCH))))
CONFIG = EngineConfig(
    DUMMY, num_blocks=64, num_threads=1, max_num_seqs=16, max_model_len=16, max_loras=1
)
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/embeddings": {"input": [1, 2, 3]},
}
HTTP_FIELDS = [
    "model", "stream", "stream_options", "n", "temperature", "top_p", "top_k", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "max_tokens",
    "skip_special_tokens", "priority", "cache_salt", "kv_transfer_params", "logit_bias",
    "bad_words", "prompt_logprobs", "response_format", "structured_outputs", "user", "echo",
    "prompt", "logprobs", "messages", "tools", "tool_choice", "top_logprobs", "metadata", "input",
    "encoding_format", "dimensions", "no_such_field",
]  # fmt: skip
MORE = [("options", name) for name in ("data_parallel_rank", "piece")]
batches = st.lists(calls(), min_size=BATCH, max_size=BATCH)


def check_failure(call: Call, error: str) -> None:
    """Failures of the engine are for what only it can know, and never a defect."""
    assert may_fail_in_the_engine(call) or error.startswith("overloaded"), (call, error)
    assert "internal error" not in error
    assert "unexpected" not in error


# --- in process ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    engine = LLMEngine(CONFIG, log_stats=False)
    yield engine
    engine.shutdown()


def check_output(call: Call, output: RequestOutput | PoolingRequestOutput) -> None:
    if isinstance(output, RequestOutput):
        for answer in output.outputs:
            if answer.finish_reason == "error":
                check_failure(call, str(answer.stop_reason))


@EXAMPLES
@given(batches)
def test_contract_L03_any_call_of_an_engine_is_answered(
    engine: LLMEngine, batch: list[Call]
) -> None:
    core = engine.engine_core.core  # type: ignore[attr-defined]
    for call in batch:
        with contextlib.suppress(InvalidRequestError):
            engine.add_request(**arguments(call))
    deadline = Deadline("an end of every request")
    while engine.has_unfinished_requests():
        deadline.check()
        for output in engine.step():
            check_output(dict(chain.from_iterable(call.items() for call in batch)), output)
    assert engine.get_num_unfinished_requests() == 0
    assert not core.scheduler.requests
    assert core.scheduler.pool.num_free == CONFIG.num_blocks


# --- over ZMQ -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def served(loop: asyncio.AbstractEventLoop) -> Iterator[AsyncLLM]:
    engine = loop.run_until_complete(AsyncLLM.start(CONFIG))
    yield engine
    engine.shutdown()
    loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop), return_exceptions=True))


async def pieces(call: Call) -> AsyncGenerator[StreamingInput, None]:
    yield StreamingInput([1, 2])
    if ("options", "piece") in call:
        yield call["options", "piece"]


async def ask(engine: AsyncLLM, call: Call) -> None:
    """One call to its end."""
    wanted = arguments(call)
    wanted.pop("piece", None)
    prompt, params = wanted.pop("prompt"), wanted.pop("params")
    outputs: AsyncGenerator[Any, None]
    if isinstance(params, PoolingParams):
        for option in ("prompt_text", "data_parallel_rank"):
            wanted.pop(option, None)
        outputs = engine.encode(prompt, params, **wanted)
    elif ("options", "piece") in call:
        outputs = engine.generate(pieces(call), params, **wanted)
    else:
        outputs = engine.generate(prompt, params, **wanted)
    try:
        async for output in outputs:
            check_output(call, output)
    except (InvalidRequestError, EngineOverloadedError):
        return
    except EngineGenerateError as exc:
        check_failure(call, str(exc))


async def ask_all(engine: AsyncLLM, batch: list[Call]) -> None:
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for call in batch:
            group.create_task(ask(engine, call))
    assert len(engine.output_processor.answers) == 0
    deadline = Deadline("all blocks are free")
    while True:
        stats = await engine.refresh_stats()
        if stats.blocks_free == stats.blocks_total:
            return
        deadline.check()


@EXAMPLES
@given(st.lists(calls(*MORE), min_size=BATCH, max_size=BATCH))
def test_contract_C05_any_call_of_a_client_is_answered(
    loop: asyncio.AbstractEventLoop, served: AsyncLLM, batch: list[Call]
) -> None:
    loop.run_until_complete(ask_all(served, batch))


# --- over HTTP ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def http(served: AsyncLLM) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(served), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def post_all(http: httpx.AsyncClient, bodies: list[tuple[str, dict[str, Any]]]) -> None:
    async def post(path: str, changes: dict[str, Any]) -> None:
        body = json.dumps({"model": "model", **ROUTES[path], **changes})
        headers = {"content-type": "application/json"}
        answer = await http.post(path, content=body.encode(errors="replace"), headers=headers)
        assert answer.status_code < 500 or answer.status_code == 503, answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["message"]

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for path, changes in bodies:
            group.create_task(post(path, changes))


@EXAMPLES
@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(ROUTES)),
            st.dictionaries(st.sampled_from(HTTP_FIELDS), JSON, min_size=1, max_size=2),
        ),
        min_size=BATCH,
        max_size=BATCH,
    )
)
def test_contract_M02_any_body_is_answered(
    loop: asyncio.AbstractEventLoop,
    served: AsyncLLM,
    http: httpx.AsyncClient,
    bodies: list[tuple[str, dict[str, Any]]],
) -> None:
    loop.run_until_complete(post_all(http, bodies))
    assert len(served.output_processor.answers) == 0
