"""Images over HTTP: an engine's own server, and a router before a prefill and a decode engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import pytest_asyncio
from model_kit.pictures import data_url, encoded, image_part, picture
from model_kit.seeing import Published
from served import serve_http
from service_kit import engine_config, healthy, make_pools, start_engine
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.curve import read_keys
from diptych_protocol import EngineClient, RequestOutputKind, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
CHAT = "/v1/chat/completions"
QUESTION = {"type": "text", "text": "what?"}


@dataclass
class Service:
    published: Published
    prefill: AsyncLLM
    decode: AsyncLLM
    router: httpx.AsyncClient
    alone: httpx.AsyncClient
    """The decode engine's own server."""

    async def encoded(self) -> list[int]:
        """Images that P and D have encoded."""
        both = (self.prefill, self.decode)
        return [(await engine.refresh_stats()).images_encoded for engine in both]


@asynccontextmanager
async def served(engine: EngineClient) -> AsyncIterator[httpx.AsyncClient]:
    bound: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(
        serve_http(build_app(engine), "127.0.0.1", 0, on_ready=lambda *at: bound.set_result(at))
    )
    try:
        host, port = await bound
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=PATIENCE_S) as http:
            yield http
    finally:
        server.cancel()
        await asyncio.wait((server,))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    tmp_path_factory: pytest.TempPathFactory, keys_dir: Path
) -> AsyncIterator[Service]:
    published = Published(tmp_path_factory.mktemp("seeing"))
    exact: Json = {"weight_packing": "none", "block_size": 4}
    (prefill, at_p), (decode, at_d) = await asyncio.gather(
        start_engine(engine_config("seeing-p", published.uri, **exact), keys_dir),
        start_engine(engine_config("seeing-d", published.uri, **exact), keys_dir),
    )
    pools = make_pools(published.uri, at_p, at_d, read_keys(keys_dir))
    pools.start()
    async with AsyncExitStack() as running:
        for each in (prefill, decode, pools):
            running.callback(each.shutdown)
        await healthy(pools)
        router = await running.enter_async_context(served(pools))
        alone = await running.enter_async_context(served(decode))
        yield Service(published, prefill, decode, router, alone)


def body(*parts: Any, **changes: Any) -> Json:
    messages = [{"role": "user", "content": [*parts, QUESTION]}]
    fixed = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    return {"model": "smollm2", "messages": messages, **fixed, **changes}


async def told(http: httpx.AsyncClient, asked: Json) -> Json:
    answer = await http.post(CHAT, json=asked)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def text_of(answer: Json) -> str:
    return str(answer["choices"][0]["message"]["content"])


async def test_the_pools_see_what_one_engine_sees(service: Service) -> None:
    asked = [body(image_part(picture(seed))) for seed in (1, 2)]
    asked.append(body(image_part(picture(1)), QUESTION, image_part(picture(2))))
    through = [await told(service.router, each) for each in asked]
    assert await service.encoded() == [2, 0], "the third prompt has the images of the others"
    alone = [await told(service.alone, each) for each in asked]
    assert [*map(text_of, through)] == [*map(text_of, alone)]
    assert len({*map(text_of, through)}) == 3, "else the images would not matter"
    rendered = service.decode.renderer.render_chat(asked[0]["messages"])
    assert through[0]["usage"]["prompt_tokens"] == len(rendered["prompt_token_ids"])


async def test_the_answer_is_the_one_of_transformers(service: Service) -> None:
    asked = body(image_part(picture(3)), logprobs=True, top_logprobs=1)
    answer = await told(service.router, asked)
    chosen = [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]]
    best = [
        each["top_logprobs"][0]["logprob"] for each in answer["choices"][0]["logprobs"]["content"]
    ]
    assert chosen == best
    rendered = service.decode.renderer.render_chat(asked["messages"])
    outputs = service.prefill.generate(rendered, _params(12), "same")
    [final] = [output async for output in outputs]
    assert service.published.worst_gap(rendered, final.outputs[0].token_ids) < 1e-2
    assert final.outputs[0].text == text_of(answer)


def _params(max_tokens: int) -> Any:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip


async def test_the_openai_client_streams_about_an_image(service: Service) -> None:
    whole = text_of(await told(service.router, body(image_part(picture(1)))))
    client = openai.AsyncOpenAI(
        base_url=str(service.router.base_url.join("/v1")),
        api_key="none",
        max_retries=0,
        timeout=PATIENCE_S,
    )
    content: Any = [
        {"type": "image_url", "image_url": {"url": data_url(picture(1)), "detail": "low"}},
        QUESTION,
    ]
    stream = await client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": content}], temperature=0.0,
        max_tokens=12, stream=True, extra_body={"ignore_eos": True},
    )  # fmt: skip
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    await client.close()
    assert "".join(pieces) == whole


async def test_routers_send_images_again_that_engines_forgot(service: Service) -> None:
    asked = body(image_part(picture(4)))
    expected = text_of(await told(service.router, asked))
    for engine in (service.prefill, service.decode):
        note = await engine.call_core("reset_mm_cache", timeout_s=30)
        assert note.endswith("have to be sent again")
        assert await engine.call_core("reset_prefix_cache", True, timeout_s=30) is True
    before = await service.encoded()
    assert text_of(await told(service.router, asked)) == expected
    assert await service.encoded() == [before[0] + 1, before[1]]


@pytest.mark.parametrize(
    ("part", "param", "why"),
    [
        ({"type": "image_url", "image_url": {"url": "https://a.example/cat.png"}},
         "messages[0].content[0].image_url.url", "fetches no images"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
         "messages[0].content[0].image_url.url", "not an image that can be read"),
        ({"type": "image_url", "image_url": {"url": data_url(encoded(picture(1))[:90])}},
         "messages[0].content[0].image_url.url", "not an image that can be read"),
        ({"type": "image_url"}, "messages", "image_url"),
        ({"type": "image_url", "image_url": {"url": "data:,", "detail": "huge"}},
         "messages", "huge"),
        ({"type": "input_audio", "input_audio": {}}, "messages", "input_audio"),
        ({"type": "text", "text": "an <image> of words"}, "messages", "image tokens"),
    ],
)  # fmt: skip
async def test_what_is_no_image_is_a_400_that_says_why(
    service: Service, part: Json, param: str, why: str
) -> None:
    for http in (service.router, service.alone):
        answer = await http.post(CHAT, json=body(part))
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert why in error["message"]
        assert error["param"] == param


async def test_texts_are_served_beside_images(service: Service) -> None:
    both = await asyncio.gather(
        *(told(service.router, body(image_part(picture(5 + i)))) for i in range(3)),
        *(told(service.router, body(QUESTION)) for _ in range(3)),
    )
    assert len({*map(text_of, both[3:])}) == 1
    assert {*map(text_of, both[:3])}.isdisjoint({*map(text_of, both[3:])})


async def test_a_model_without_vision_answers_images_with_a_clear_400(
    smollm2: str, keys_dir: Path
) -> None:
    engine = AsyncLLM(msgspec.structs.replace(engine_config("blind", smollm2), kv_transfer=None))
    async with served(engine) as http:
        answer = await http.post(CHAT, json=body(image_part(picture(1))))
    engine.shutdown()
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[0]"
    assert "this model takes only text parts" in error["message"]
