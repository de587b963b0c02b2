"""Vectors through every door: AsyncLLM, the router's client, and /v1/embeddings on both."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import torch
import torch.nn.functional as F
from cases import each
from engine_kit.core import EXACT, make_core
from engine_kit.executor import PACED
from engine_kit.pooling import hidden_states, runner_of
from model_kit.gguf import first_layers
from served import serve_http
from service_kit import Pair, generate, importing_support
from waits import PATIENCE_S

from diptych_engine.control.core import EngineCore
from diptych_frontend.app import build_app
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.client import CoreClient
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.probes import METRICS_AGE_S
from diptych_frontend.text import input_processor
from diptych_protocol import (
    Array,
    EmbedsPrompt,
    EngineClient,
    EngineCoreRequest,
    EngineGenerateError,
    InvalidRequestError,
    LoRARequest,
    PoolingParams,
    PoolingRequestOutput,
    PromptType,
    SamplingParams,
)
from diptych_router.requests.pool_client import PoolClient

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["The capital of France is Paris.", "A lighthouse by the sea", "1 2 3"]
LONG = [7 + i % 900 for i in range(4000)]
"""Takes 250 steps, and rests after each."""
WIDTH = 576


@pytest.fixture(scope="module")
def smollm2(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two layers of the real model: nobody here expects words of it."""
    whole = resolve_model(smollm2).path
    assert whole is not None
    with importing_support():
        yield first_layers(whole, 2, tmp_path_factory.mktemp("model") / "short.gguf")


@pytest.fixture(scope="module")
def pair_options() -> dict[str, Any]:
    """Vectors are compared with those that torch computes. Who leaves has one short step more."""
    few = {"max_num_seqs": 16, "max_num_batched_tokens": 16}
    return {"weight_packing": EXACT, "executor_class": PACED, **few}


@pytest.fixture(params=["engine", "router"])
def client(request: pytest.FixtureRequest, pair: Pair) -> EngineClient:
    return pair.prefill if request.param == "engine" else pair.pools


async def embed(
    client: EngineClient, prompt: PromptType, request_id: str = "e", **params: Any
) -> PoolingRequestOutput:
    """The one output of a request."""
    [output] = [o async for o in client.encode(prompt, PoolingParams(**params), request_id)]
    return output


def vector(output: PoolingRequestOutput) -> torch.Tensor:
    return torch.tensor(output.outputs.data.tolist())


async def test_contract_C06_an_embedding_is_what_torch_computes(
    client: EngineClient, reference: dict[str, torch.Tensor]
) -> None:
    for text, expected in reference.items():
        output = await embed(client, text, f"id of {text}")
        assert output.finished
        assert output.request_id == f"id of {text}"
        assert len(output.prompt_token_ids) > 1
        torch.testing.assert_close(vector(output), expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def core(smollm2: str) -> EngineCore:
    return make_core(smollm2)


@pytest.fixture(scope="module")
def reference(core: EngineCore, pair: Pair) -> dict[str, torch.Tensor]:
    made = {}
    for text in TEXTS:
        token_ids = pair.prefill.renderer.render_prompt(text)["prompt_token_ids"]
        made[text] = F.normalize(hidden_states(core, token_ids)[-1], dim=0)
    return made


async def test_contract_C06_token_embed_gives_a_row_per_token(client: EngineClient) -> None:
    two_steps = LONG[:100]
    output = await embed(client, two_steps, task="token_embed", dimensions=4)
    assert output.outputs.data.shape == (100, 4)
    last = await embed(client, two_steps, dimensions=4)
    torch.testing.assert_close(vector(output)[-1], vector(last), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("params", "param", "complaint"),
    [
        ({"task": "classify"}, "task", "embed, token_embed"),
        ({"task": "generate"}, "task", "embed, token_embed"),
        ({"dimensions": WIDTH + 1}, "dimensions", "at most 576"),
        ({"dimensions": 0}, "dimensions", "at least 1"),
    ],
)
async def test_contract_C06_what_cannot_be_pooled_is_refused_by_name(
    client: EngineClient, params: dict[str, Any], param: str, complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint) as caught:
        await embed(client, "text", **params)
    assert caught.value.param == param


async def test_contract_C06_a_request_for_one_call_is_refused_by_the_other(pair: Pair) -> None:
    request = EngineCoreRequest(
        "r", [1, 2], None, None, PoolingParams(), None, 0.0, None, None, None
    )
    with pytest.raises(InvalidRequestError, match="for encode"):
        await anext(pair.prefill.generate(request, SamplingParams(), "r"))


async def test_contract_C06_many_at_once_are_each_their_own(client: EngineClient) -> None:
    prompts = [LONG[i : i + 3 + i % 40] for i in range(24)]
    together = await asyncio.gather(*(embed(client, prompt, "same id") for prompt in prompts))
    for prompt, output in list(zip(prompts, together, strict=True))[::10]:
        assert output.prompt_token_ids == prompt
        alone = await embed(client, prompt)
        torch.testing.assert_close(vector(output), vector(alone), rtol=1e-4, atol=1e-4)


async def test_contract_C06_the_router_sends_prompts_to_the_prefill_pool(pair: Pair) -> None:
    async def computed() -> list[int]:
        engines = (pair.prefill, pair.decode)
        return [(await engine.refresh_stats()).prompt_tokens_computed for engine in engines]

    at_prefill, at_decode = await computed()
    await embed(pair.pools, LONG[100:200])
    assert await computed() == [at_prefill + 100, at_decode]


async def test_contract_C06_an_aborted_request_has_no_vector(
    client: EngineClient, pair: Pair, eventually: Any
) -> None:
    asked = asyncio.create_task(embed(client, LONG, "endless", task="token_embed"))
    await eventually(lambda: busy(pair.prefill))
    await client.abort("endless")
    with pytest.raises(EngineGenerateError, match="aborted"):
        await asked
    await eventually(pair.all_blocks_free)


async def test_contract_C06_whoever_leaves_early_takes_the_request_along(
    client: EngineClient, pair: Pair, eventually: Any
) -> None:
    asked = asyncio.create_task(embed(client, LONG[::-1]))
    await eventually(lambda: busy(pair.prefill))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await eventually(pair.all_blocks_free)


@pytest.fixture(scope="module")
def embeddings_of(core: EngineCore) -> Callable[[list[int], str], Array]:
    """The model's own embeddings of some tokens."""
    table = runner_of(core).model.slots["model.embed_tokens.weight"].target

    def make(token_ids: list[int], dtype: str) -> Array:
        values = table[token_ids].to(getattr(torch, dtype))
        return Array(dtype, tuple(values.shape), values.view(torch.uint8).numpy().tobytes())

    return make


async def busy(engine: AsyncLLM) -> bool:
    return (await engine.refresh_stats()).num_running > 0


async def test_contract_C06_an_adapter_that_is_not_there_is_an_error(client: EngineClient) -> None:
    adapter = LoRARequest("none", 1, "/nowhere")
    outputs = client.encode([1, 2, 3], PoolingParams(), "r", lora_request=adapter)
    with pytest.raises((InvalidRequestError, EngineGenerateError)):
        await anext(outputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_contract_B10_prompt_embeds_cross_the_hinge(
    pair: Pair, embeddings_of: Callable[[list[int], str], Array], dtype: str
) -> None:
    """Both engines know them, so the lease is for these embeddings and no others."""
    text = "The lighthouse keeper climbed the stairs every evening to light the lamp, and then"
    token_ids = pair.prefill.renderer.render_prompt(text)["prompt_token_ids"]
    expected = await generate(pair.decode, text, max_tokens=4)
    prompt = EmbedsPrompt(prompt_embeds=embeddings_of(token_ids, dtype))
    before = await pair.decode.refresh_stats()
    output = await generate(pair.pools, prompt, max_tokens=4)
    after = await pair.decode.refresh_stats()
    assert output.prompt_token_ids == [0] * len(token_ids)
    assert after.remote_kv_tokens - before.remote_kv_tokens == len(token_ids)
    assert after.prompt_tokens_computed == before.prompt_tokens_computed
    if dtype == "float32":
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


async def test_contract_A11_truncate_prompt_tokens_is_ignored_with_a_warning(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    input_processor._warn_once.cache_clear()
    outputs = pair.prefill.encode([1, 2, 3], PoolingParams(), "r", truncate_prompt_tokens=1)
    output = await anext(outputs)
    assert output.prompt_token_ids == [1, 2, 3]
    await outputs.aclose()
    [record] = [each for each in caplog.records if "truncate_prompt_tokens" in each.getMessage()]
    assert record.levelname == "WARNING"


async def test_contract_C25_the_tasks_are_told_without_asking_again(
    pair: Pair, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    call = CoreClient.call

    async def counted(self: CoreClient, method: str, *args: Any, **options: Any) -> Any:
        calls.append(method)
        return await call(self, method, *args, **options)

    monkeypatch.setattr(CoreClient, "call", counted)
    tasks = {await client.get_supported_tasks() for _ in range(10)}
    assert tasks == {("generate", "embed", "token_embed")}
    assert calls == []


# --- HTTP -----------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["engine", "router"])
async def url(request: pytest.FixtureRequest, pair: Pair) -> AsyncIterator[str]:
    """A server on one of the clients."""
    engine: AsyncLLM | PoolClient = pair.prefill if request.param == "engine" else pair.pools
    bound: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(
        serve_http(build_app(engine), "127.0.0.1", 0, on_ready=lambda *at: bound.set_result(at))
    )
    try:
        host, port = await bound
        yield f"http://{host}:{port}"
    finally:
        server.cancel()
        await asyncio.wait((server,))


@pytest_asyncio.fixture(loop_scope="module")
async def api(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


async def test_the_openai_client_gets_embeddings_of_every_form_of_input(
    api: openai.AsyncOpenAI, pair: Pair, reference: dict[str, torch.Tensor]
) -> None:
    ids = [pair.prefill.renderer.render_prompt(text)["prompt_token_ids"] for text in TEXTS]
    for given, expected in (
        (TEXTS[0], TEXTS[:1]),
        (TEXTS, TEXTS),
        (ids[1], TEXTS[1:2]),
        (ids, TEXTS),
    ):
        answer = await api.embeddings.create(model="smollm2", input=given)
        assert [item.index for item in answer.data] == list(range(len(expected)))
        for item, text in zip(answer.data, expected, strict=True):
            assert len(item.embedding) == WIDTH
            made = torch.tensor(item.embedding)
            torch.testing.assert_close(made, reference[text], rtol=1e-4, atol=1e-5)
        num_tokens = sum(len(ids[TEXTS.index(text)]) for text in expected)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens
        assert answer.model == "smollm2"


async def test_dimensions_and_encoding(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        made = []
        for form in ("float", "base64", None):
            body = {"model": "smollm2", "input": "short", "dimensions": 7, "user": "u"}
            answer = await http.post(
                "/v1/embeddings", json={**body, **({"encoding_format": form} if form else {})}
            )
            assert answer.status_code == 200
            made.append(answer.json()["data"][0]["embedding"])
    floats = torch.frombuffer(bytearray(base64.b64decode(made[1])), dtype=torch.float32)
    torch.testing.assert_close(floats, torch.tensor(made[0]), rtol=1e-5, atol=1e-6)
    assert made[0] == pytest.approx(made[2], rel=1e-4, abs=1e-5)
    assert torch.linalg.vector_norm(floats).item() == pytest.approx(1.0, abs=1e-5)
    assert len(floats) == 7


async def test_more_inputs_than_go_at_once_come_back_in_order(api: openai.AsyncOpenAI) -> None:
    inputs = [[5 + i % 30] * (1 + i % 5) for i in range(150)]
    answer = await api.embeddings.create(model="smollm2", input=inputs, dimensions=3)
    by_input: dict[tuple[int, ...], list[float]] = {}
    for given, item in zip(inputs, answer.data, strict=True):
        first = by_input.setdefault(tuple(given), item.embedding)
        assert item.embedding == pytest.approx(first, rel=1e-3, abs=1e-4)
    assert len({tuple(round(x, 3) for x in vector) for vector in by_input.values()}) > 20


@each(
    ("change", "status", "param", "complaint"),
    [
        ({"model": "other"}, 404, "model", "does not exist"),
        ({"input": []}, 400, "input", "empty"),
        ({"input": ["a", [1]]}, 400, "input", "mixes"),
        ({"input": ""}, 400, "input", "empty"),
        ({"input": ["fine", ""]}, 400, "input", "empty"),
        ({"input": [10**6]}, 400, "input", "outside the vocabulary"),
        ({"input": 5}, 400, "input", "input"),
        ({"input": [[1]] * 2049}, 400, "input", "at most 2048"),
        ({"input": [1] * 9000}, 400, "input", "limit"),
        ({"dimensions": WIDTH + 1}, 400, "dimensions", "at most 576"),
        ({"dimensions": 0}, 400, "dimensions", "dimensions"),
        ({"encoding_format": "hex"}, 400, "encoding_format", "encoding_format"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, 400, "kv_transfer_params", "hand-off"),
    ],
)
async def test_a_bad_request_is_answered_with_the_field_at_fault(
    url: str, change: dict[str, Any], status: int, param: str, complaint: str
) -> None:
    body = {"model": "smollm2", "input": "text", **change}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        answer = await http.post("/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert complaint in error["message"]


async def test_a_client_that_leaves_ends_all_its_inputs(
    url: str, pair: Pair, eventually: Any
) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        body = {"model": "smollm2", "input": [LONG[i:] for i in range(20)]}
        asked = asyncio.create_task(http.post("/v1/embeddings", json=body))
        await eventually(lambda: busy(pair.prefill))
        asked.cancel()
        await asyncio.wait((asked,))
    await eventually(pair.all_blocks_free)


async def test_embeddings_are_counted(url: str, eventually: Any) -> None:
    def total(text: str, name: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(f"diptych:{name}_total")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if "abort" not in line)

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:

        async def counted() -> list[float]:
            text = (await http.get("/metrics")).text
            return [total(text, name) for name in ("prompt_tokens", "request_success")]

        await asyncio.sleep(METRICS_AGE_S)  # what others did is in there
        tokens, ended = await counted()
        await http.post("/v1/embeddings", json={"model": "smollm2", "input": [[1, 2], [3, 4, 5]]})

        async def is_counted() -> bool:
            return await counted() == [tokens + 5, ended + 2]

        await eventually(is_counted)
