"""`generate` with a prompt that comes in pieces: rows B9 and C27, through a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
from engine_kit.core import DUMMY

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import (
    EngineConfig,
    EngineGenerateError,
    InvalidRequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StreamingInput,
    StructuredOutputsParams,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = EngineConfig(
    DUMMY,
    num_blocks=64,
    num_threads=1,
    max_num_seqs=4,
    max_idle_sessions=2,
    streaming_input_timeout_s=5.0,
)
Eventually = Callable[..., Awaitable[Any]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[AsyncLLM]:
    engine = await AsyncLLM.start(CONFIG)
    yield engine
    engine.shutdown()


def sampling(max_tokens: int = 1, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)


DELTA = RequestOutputKind.DELTA


async def pieces_of(*prompts: list[int] | StreamingInput) -> AsyncGenerator[StreamingInput, None]:
    for prompt in prompts:
        yield prompt if isinstance(prompt, StreamingInput) else StreamingInput(prompt)


async def outputs_of(
    engine: AsyncLLM, prompt: Any, params: SamplingParams, name: str = "session"
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, name)]


async def idle(engine: AsyncLLM) -> bool:
    stats = await engine.refresh_stats()
    return stats.blocks_free == stats.blocks_total and not (
        stats.num_running or stats.num_waiting or stats.num_waiting_for_input
    )


async def test_contract_C27_three_pieces_are_answered_as_one_prompt(engine: AsyncLLM) -> None:
    a, b, c = [1, 2, 3, 4, 5], [6] * 20, [7, 8]
    pieces = pieces_of(a, b, StreamingInput(c, sampling(max_tokens=6)))
    made = await outputs_of(engine, pieces, sampling())
    *_, alone = await outputs_of(engine, a + b + c, sampling(max_tokens=6))
    answers = [o for o in made if o.outputs[0].finish_reason == "length"]
    assert [o.prompt_token_ids for o in answers] == [a, a + b, a + b + c]
    assert answers[-1].outputs[0].token_ids == alone.outputs[0].token_ids
    assert [o.finished for o in made] == [False] * (len(made) - 1) + [True]
    assert {o.request_id for o in made} == {"session"}
    assert await idle(engine)


async def test_contract_B09_an_answer_stays_but_for_its_last_token(engine: AsyncLLM) -> None:
    made = await outputs_of(
        engine, pieces_of([1, 2, 3], [4, 5]), sampling(max_tokens=5, output_kind=DELTA)
    )
    first: list[int] = []
    for output in made:
        first += output.outputs[0].token_ids
        if output.outputs[0].finish_reason:
            break
    second = next(o for o in made if o.prompt_token_ids != [1, 2, 3])
    assert second.prompt_token_ids == [1, 2, 3, *first[:4], 4, 5]


async def test_contract_B09_an_error_of_the_users_generator_is_his_own(
    engine: AsyncLLM, eventually: Eventually
) -> None:
    class OwnError(Exception):
        pass

    async def pieces() -> AsyncGenerator[StreamingInput, None]:
        yield StreamingInput([1, 2, 3])
        raise OwnError

    with pytest.raises(OwnError) as raised:
        await outputs_of(engine, pieces(), sampling())
    assert raised.value.__cause__ is None
    await eventually(lambda: idle(engine))


async def test_contract_B09_a_consumer_that_leaves_ends_prompt_and_request(
    engine: AsyncLLM, eventually: Eventually
) -> None:
    closed = asyncio.Event()

    async def pieces() -> AsyncGenerator[StreamingInput, None]:
        try:
            while True:
                yield StreamingInput([1, 2, 3])
        finally:
            closed.set()

    async with aclosing(engine.generate(pieces(), sampling(), "left")) as outputs:
        async for output in outputs:
            if len(output.prompt_token_ids) > 6:
                break
    assert closed.is_set()
    await eventually(lambda: idle(engine))


async def test_contract_B09_a_prompt_that_stops_coming_is_given_up(
    engine: AsyncLLM, eventually: Eventually
) -> None:
    closed = asyncio.Event()

    async def pieces() -> AsyncGenerator[StreamingInput, None]:
        try:
            yield StreamingInput([1, 2, 3])
            await asyncio.Event().wait()
        finally:
            closed.set()

    with pytest.raises(InvalidRequestError, match="no piece of the prompt came for 5 s") as late:
        await outputs_of(engine, pieces(), sampling())
    assert late.value.status == 408
    assert closed.is_set()
    await eventually(lambda: idle(engine))


class Open:
    """A session that waits for its second piece."""

    def __init__(self, engine: AsyncLLM, name: str) -> None:
        self.more = asyncio.Event()
        self.answered = asyncio.Event()
        self.outputs: list[RequestOutput] = []
        self.task = asyncio.create_task(self._read(engine, name))

    async def _pieces(self) -> AsyncGenerator[StreamingInput, None]:
        yield StreamingInput([1, 2, 3])
        self.answered.set()
        await self.more.wait()
        yield StreamingInput([4])

    async def _read(self, engine: AsyncLLM, name: str) -> None:
        async for output in engine.generate(self._pieces(), sampling(), name):
            self.outputs.append(output)


async def test_contract_B09_an_idle_session_can_be_aborted(engine: AsyncLLM) -> None:
    session = Open(engine, "idle")
    await session.answered.wait()
    stats = await engine.refresh_stats()
    assert stats.num_waiting_for_input == 1
    assert stats.blocks_free == stats.blocks_total - 1
    await engine.abort("idle")
    await session.task
    assert session.outputs[-1].finished
    assert session.outputs[-1].outputs[0].finish_reason == "abort"
    assert await idle(engine)


async def test_contract_B09_idle_sessions_are_bounded(engine: AsyncLLM) -> None:
    sessions = []
    for i in range(3):
        sessions.append(session := Open(engine, f"s{i}"))
        await session.answered.wait()
    oldest, *others = sessions
    with pytest.raises(EngineGenerateError, match="too many sessions are idle"):
        await oldest.task
    for session in others:
        session.more.set()
        await session.task
        assert session.outputs[-1].finished
    assert await idle(engine)


async def test_contract_B09_a_session_lives_beside_other_requests(engine: AsyncLLM) -> None:
    session = Open(engine, "beside")
    await session.answered.wait()
    await asyncio.gather(
        *(outputs_of(engine, [i] * 9, sampling(max_tokens=20), f"r{i}") for i in range(1, 7))
    )
    session.more.set()
    await session.task
    *_, alone = await outputs_of(engine, [1, 2, 3, 4], sampling())
    assert session.outputs[-2].outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (sampling(n=2), "n"),
        (sampling(output_kind=RequestOutputKind.FINAL_ONLY), "output_kind"),
        (sampling(prompt_logprobs=1), "prompt_logprobs"),
        (sampling(stop=["x"]), "stop"),
        (sampling(structured_outputs=StructuredOutputsParams(regex="a")), "structured_outputs"),
        (sampling(extra_args={"kv_transfer_params": {}}), "kv_transfer_params"),
    ],
)
async def test_contract_B09_what_goes_with_no_streamed_prompt(
    engine: AsyncLLM, params: SamplingParams, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await outputs_of(engine, pieces_of([1]), params)
    assert refused.value.param == field
    with pytest.raises(InvalidRequestError) as refused:
        await outputs_of(engine, pieces_of(StreamingInput([1], params)), sampling())
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("pieces", "field"),
    [
        ([], "prompt"),
        ([[]], "prompt"),
        ([[1], []], "prompt"),
        ([[1], [64]], "prompt"),
        ([[1], [1] * 2048], "prompt"),
        ([[1], StreamingInput([1], sampling(output_kind=DELTA))], "output_kind"),
    ],
)
async def test_contract_B09_a_bad_piece_is_the_users_error(
    engine: AsyncLLM, eventually: Eventually, pieces: list[Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await outputs_of(engine, pieces_of(*pieces), sampling())
    assert refused.value.param == field
    await eventually(lambda: idle(engine))
