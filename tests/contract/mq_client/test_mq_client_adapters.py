"""Adapters with tokenizers of their own, asked through the older client: rows Q15 and Q17."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_kit import logits_processors
from engine_kit.mq import LONG, Eventually, answer, reading, running, set_up
from model_kit.checkpoints import SIZES, random_tensors, save_adapter, save_model
from tokenizers import Tokenizer, models, pre_tokenizers

from diptych_engine import MQLLMEngineClient
from diptych_frontend.core_client.launcher import CoreProcess
from diptych_frontend.v0.params import GuidedDecodingParams
from diptych_frontend.v0.params import SamplingParams as SamplingParamsOfV0
from diptych_protocol import (
    EngineConfig,
    EngineGenerateError,
    InvalidRequestError,
    LoRARequest,
    RequestOutputKind,
    SamplingParams,
)

WORDS = [f"w{number}" for number in range(SIZES["vocab_size"])]
PROMPT = "w5 w6 w7"


def save_tokenizer(folder: Path, words: list[str]) -> None:
    backend = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an adapter that counts its words backwards, and one without a tokenizer."""
    root = tmp_path_factory.mktemp("adapters")
    save_model(root / "base", random_tensors(0))
    save_tokenizer(root / "base", WORDS)
    for seed, name in enumerate(("backwards", "plain")):
        save_adapter(root / name, seed + 1)
    save_tokenizer(root / "backwards", WORDS[::-1])
    return root


@pytest.fixture(scope="module")
def config(folder: Path) -> EngineConfig:
    return EngineConfig(
        str(folder / "base"),
        num_blocks=256,
        num_threads=1,
        max_loras=2,
        logits_processors=logits_processors.NAMES,
    )


@pytest.fixture(scope="module")
def core(config: EngineConfig) -> Iterator[CoreProcess]:
    with running(config) as core:
        yield core


@pytest_asyncio.fixture
async def client(core: CoreProcess) -> AsyncIterator[MQLLMEngineClient]:
    async with set_up(core) as client:
        yield client


def final() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=2, output_kind=RequestOutputKind.FINAL_ONLY)


@pytest.fixture
def adapters(folder: Path) -> dict[str, LoRARequest]:
    names = ("backwards", "plain")
    return {name: LoRARequest(name, at + 1, str(folder / name)) for at, name in enumerate(names)}


async def test_contract_Q17_an_adapter_is_asked_and_answers_in_its_own_words(
    client: MQLLMEngineClient, adapters: dict[str, LoRARequest]
) -> None:
    own = adapters["backwards"]
    theirs = await client.get_tokenizer(own)
    assert theirs.encode(PROMPT) == [len(WORDS) - 1 - number for number in (5, 6, 7)]
    assert theirs is await client.get_tokenizer(own), "it is read once"
    base = await client.get_tokenizer()
    assert base is await client.get_tokenizer(adapters["plain"])
    assert base.encode(PROMPT) == [5, 6, 7]

    by_text = await answer(client, PROMPT, own, max_tokens=8, ignore_eos=True)
    by_ids = await answer(client, [58, 57, 56], own, max_tokens=8, ignore_eos=True)
    assert by_text == by_ids
    in_base = await answer(client, {"prompt": PROMPT}, adapters["plain"], max_tokens=8)
    assert in_base == await answer(client, [5, 6, 7], adapters["plain"], max_tokens=8)
    assert in_base != by_text


async def test_contract_Q17_words_are_detokenised_by_their_adapter(
    client: MQLLMEngineClient, adapters: dict[str, LoRARequest]
) -> None:
    own = adapters["backwards"]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = [output async for output in client.generate(PROMPT, params, "r", own)]
    said = outputs[-1].outputs[0]
    theirs, base = await client.get_tokenizer(own), await client.get_tokenizer()
    assert said.text.strip() == theirs.decode(said.token_ids) != base.decode(said.token_ids)


async def test_contract_Q17_bad_words_are_the_adapters(
    client: MQLLMEngineClient, adapters: dict[str, LoRARequest]
) -> None:
    own = adapters["backwards"]
    said = (await answer(client, PROMPT, own, max_tokens=1, ignore_eos=True)).strip()
    otherwise = await answer(client, PROMPT, own, max_tokens=1, ignore_eos=True, bad_words=[said])
    assert otherwise.strip() != said
    [output] = [o async for o in client.generate(PROMPT, final(), "r", own)]
    assert output.prompt == PROMPT
    assert output.prompt_token_ids == [58, 57, 56]


async def test_contract_Q09_Q17_a_form_is_refused_beside_another_tokenizer(
    client: MQLLMEngineClient, adapters: dict[str, LoRARequest]
) -> None:
    """The engine would compile it for the model's own."""
    guided = GuidedDecodingParams(choice=["w5"])
    with pytest.raises(InvalidRequestError, match="this adapter has a tokenizer of its own"):
        await answer(client, PROMPT, adapters["backwards"], guided_decoding=guided)
    assert not client.output_queues
    assert await answer(client, PROMPT, adapters["plain"], max_tokens=1) != ""


async def test_contract_Q15_adapters_are_loaded_while_others_generate(
    config: EngineConfig, adapters: dict[str, LoRARequest], eventually: Eventually
) -> None:
    with running(config) as core:  # it has loaded none yet
        async with set_up(core) as client:
            [task] = reading(client, "r", length=min(LONG, 400))
            await eventually(lambda: client.output_queues)
            loads = [client.add_lora(adapter) for adapter in adapters.values()]
            _, asleep = await asyncio.gather(asyncio.gather(*loads), client.is_sleeping())
            assert asleep is False
            assert await client.list_loras() == {1, 2}
            assert len(await task) == 400


async def test_contract_Q08_Q09_logits_processors_are_functions_that_the_engine_has_too(
    client: MQLLMEngineClient,
) -> None:
    """Their names travel; the caller's parameters keep the functions."""
    functions: list[Any] = [logits_processors.count_up]
    params: Any = SamplingParamsOfV0(max_tokens=3, logits_processors=functions)
    outputs = [output async for output in client.generate([1, 2], params, "r")]
    assert outputs[-1].outputs[0].token_ids == [10, 11, 12]
    assert params.logits_processors == [logits_processors.count_up]
    by_name = {"logits_processors": [logits_processors.NAMES[0]]}
    assert await answer(client, [1, 2], max_tokens=2, **by_name) == " w10 w11"
    for bad in ([lambda ids, logits: logits], [print], [object()]):
        with pytest.raises(InvalidRequestError, match="logits_processors"):
            await answer(client, [1, 2], logits_processors=bad)
    [task] = reading(client, "beside", length=20)
    with pytest.raises(EngineGenerateError, match="nothing suits me"):
        await answer(client, [1, 2], logits_processors=[logits_processors.fail])
    assert len(await task) == 20
    assert client.is_running


async def test_a_tokenizer_that_cannot_be_read_is_refused(
    client: MQLLMEngineClient, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        await answer(client, PROMPT, LoRARequest("broken", 9, str(tmp_path)))
    assert not client.output_queues
