"""A prompt that is an `EngineCoreRequest` of the caller's: rows M3, L3, A3, C6 and C27."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from engine_kit.llm_engine import ARGS, params, run

from diptych_engine import AsyncLLM, LLMEngine
from diptych_frontend.text import input_processor
from diptych_protocol import (
    EngineCoreRequest,
    InvalidRequestError,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StreamingInput,
    TokensPrompt,
)

HIDDEN = 32
FINAL = RequestOutputKind.FINAL_ONLY
EMBEDS = torch.linspace(-2.0, 2.0, 5 * HIDDEN).reshape(5, HIDDEN)
KINDS: dict[str, Callable[[], object]] = {"torch": lambda: EMBEDS, "numpy": EMBEDS.numpy}


def made(name: str = "made", **fields: Any) -> EngineCoreRequest:
    empty: dict[str, Any] = dict.fromkeys(EngineCoreRequest.__struct_fields__[:10])
    given = {"request_id": name, "prompt_token_ids": [1, 2, 3], "arrival_time": 1.0}
    return EngineCoreRequest(**{**empty, **given, "sampling_params": params(), **fields})


@pytest.fixture(scope="module", params=[False, True], ids=["in_process", "in_child"])
def engine(request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    engine = LLMEngine.from_engine_args(ARGS, enable_multiprocessing=request.param)
    yield engine
    engine.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncLLM]:
    engine = AsyncLLM.from_engine_args(ARGS)
    await engine.ready()
    yield engine
    engine.shutdown()


async def last(client: AsyncLLM, prompt: Any, wanted: Any = None, **options: Any) -> RequestOutput:
    wanted = params(output_kind=FINAL) if wanted is None else wanted
    return [o async for o in client.generate(prompt, wanted, "r", **options)][-1]


def token_ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_contract_M03_embeddings_of_a_made_request_are_those_of_a_prompt(
    engine: LLMEngine, kind: str
) -> None:
    embeds: Any = KINDS[kind]()
    engine.add_request("plain", {"prompt_embeds": EMBEDS}, params())
    engine.add_request("made", made(prompt_token_ids=None, prompt_embeds=embeds), params())
    outputs = run(engine)
    assert token_ids(outputs["made"][-1]) == token_ids(outputs["plain"][-1])
    assert len(token_ids(outputs["made"][-1])) == 8


def test_contract_M03_a_made_request_ends_at_the_token_that_it_names(engine: LLMEngine) -> None:
    engine.add_request("plain", made("plain"), params())
    whole = token_ids(run(engine)["plain"][-1])
    wanted = params(ignore_eos=False)
    engine.add_request("made", made(eos_token_id=whole[3], sampling_params=wanted), wanted)
    ended = run(engine)["made"][-1]
    assert token_ids(ended) == whole[: whole.index(whole[3]) + 1]
    assert ended.outputs[0].finish_reason == "stop"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", KINDS)
async def test_contract_M03_the_same_in_an_async_engine(client: AsyncLLM, kind: str) -> None:
    embeds: Any = KINDS[kind]()
    plain = await last(client, {"prompt_embeds": EMBEDS})
    answer = await last(client, made(prompt_token_ids=None, prompt_embeds=embeds))
    assert token_ids(answer) == token_ids(plain)


def test_contract_L03_its_maker_can_abort_a_request_by_the_id_that_it_was_given(
    engine: LLMEngine,
) -> None:
    mine = made(sampling_params=params(max_tokens=1000))
    returned = engine.add_request("made", mine, params())
    assert mine.request_id == returned != "made"
    assert mine.external_req_id == "made"
    with pytest.raises(InvalidRequestError, match="set already"):
        engine.add_request("made", mine, params())
    engine.abort_request([mine.request_id], internal=True)
    assert not engine.has_unfinished_requests()


def test_contract_L03_a_request_that_was_refused_keeps_its_id(engine: LLMEngine) -> None:
    mine = made(prompt_token_ids=[])
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.add_request("made", mine, params())
    assert (mine.request_id, mine.external_req_id) == ("made", None)


def test_contract_L03_the_parameters_of_a_made_request_count(engine: LLMEngine) -> None:
    nothing: Any = None
    engine.add_request("own", made("own", sampling_params=params(max_tokens=3)), nothing)
    bare = made("given", sampling_params=None)
    engine.add_request("given", bare, params(max_tokens=4))
    outputs = run(engine)
    lengths = {name: len(token_ids(made[-1])) for name, made in outputs.items()}
    assert lengths == {"own": 3, "given": 4}
    with pytest.raises(InvalidRequestError, match="sampling_params must be"):
        engine.add_request("none", made("none", sampling_params=None), nothing)


def test_contract_L03_only_a_made_request_needs_the_text_of_its_prompt(engine: LLMEngine) -> None:
    spelt = TokensPrompt(prompt_token_ids=[1, 2, 3], prompt="its own")
    engine.add_request("made", made(), params(), prompt_text="given")
    engine.add_request("spelt", spelt, params(), prompt_text="given")
    engine.add_request("ids", [1, 2, 3], params(), prompt_text="given")
    told = {name: outputs[-1].prompt for name, outputs in run(engine).items()}
    assert told == {"made": "given", "spelt": "its own", "ids": None}


@pytest.mark.asyncio(loop_scope="module")
async def test_contract_A03_the_same_of_parameters_texts_and_ids(client: AsyncLLM) -> None:
    mine = made(sampling_params=params(max_tokens=3, output_kind=FINAL))
    answer = await last(client, mine, wanted=PoolingParams(), prompt_text="given")
    assert (len(token_ids(answer)), answer.prompt) == (3, "given")
    assert mine.request_id.startswith("made-")
    assert mine.external_req_id == answer.request_id == "made"
    spelt = TokensPrompt(prompt_token_ids=[1, 2, 3], prompt="its own")
    assert (await last(client, spelt, prompt_text="given")).prompt == "its own"


@pytest.mark.asyncio(loop_scope="module")
async def test_contract_A03_a_request_goes_to_the_method_that_fits_its_parameters(
    client: AsyncLLM,
) -> None:
    pools = made(sampling_params=None, pooling_params=PoolingParams())
    with pytest.raises(InvalidRequestError, match="for encode"):
        await last(client, pools, wanted=SamplingParams())
    with pytest.raises(InvalidRequestError, match="for generate"):
        await anext(client.encode(made(), PoolingParams(), "r"))  # type: ignore[arg-type]
    [vector] = [o async for o in client.encode(pools, PoolingParams(), "r")]  # type: ignore[arg-type]
    assert vector.finished


@pytest.mark.asyncio(loop_scope="module")
async def test_contract_C27_a_prompt_in_pieces_has_the_text_that_was_given(
    client: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    async def pieces() -> AsyncGenerator[StreamingInput, None]:
        for piece in ([1, 2, 3], [4, 5]):
            yield StreamingInput(piece)

    input_processor._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        outputs = client.generate(pieces(), params(max_tokens=1), "r", prompt_text="given")
        told = {tuple(o.prompt_token_ids or ()): o.prompt async for o in outputs}
    assert told == {(1, 2, 3): "given", (1, 2, 3, 4, 5): "given"}
    assert caplog.records == [], "nobody made a request of his own"


@pytest.mark.asyncio(loop_scope="module")
async def test_contract_C06_reasoning_means_nothing_to_encode_either(client: AsyncLLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"set the engine.s reasoning_parser") as refusal:
        await anext(client.encode([1, 2], PoolingParams(), "r", reasoning_ended=False))
    assert refusal.value.param == "reasoning_ended"
