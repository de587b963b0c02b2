"""What is large is judged before work is done for it, and the work is done beside the event loop.

How long the loop is held is measured by `make chaos` (`large_requests`); here it is counted what
runs on the loop's thread, and what is not done at all.
"""

from __future__ import annotations

import asyncio
import json
import threading
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from chaos_kit.large_requests import english, large_requests
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.openai.api_keys import ApiKeys
from diptych_frontend.openai.generation import BEGUN_AT_ONCE
from diptych_frontend.openai.request_workers import INLINE_BYTES, MAX_WAITING_BYTES
from diptych_frontend.text.renderer import TextRenderer
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import EngineOverloadedError

ASK = {"model": "echo", "max_tokens": 1}
TOO_LARGE = large_requests("echo")


class ThreadsOf(msgspec.Struct):
    """Which threads called what."""

    render: set[int] = msgspec.field(default_factory=set)


@pytest.fixture
def renderers(engine: Any) -> ThreadsOf:
    """The threads in which the engine's renderer works."""
    seen = ThreadsOf()
    for name in ("render_prompt", "render_chat"):
        call = getattr(engine.renderer, name)

        def noted(*args: Any, call: Any = call, **options: Any) -> Any:
            seen.render.add(threading.get_ident())
            return call(*args, **options)

        setattr(engine.renderer, name, noted)
    return seen


@pytest.fixture
async def client(engine: Any) -> Any:
    transport = httpx.ASGITransport(build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize("kind", TOO_LARGE)
async def test_too_much_is_refused_before_it_is_rendered(
    client: httpx.AsyncClient, renderers: ThreadsOf, kind: str
) -> None:
    request = TOO_LARGE[kind]
    headers = {"content-type": "application/json"}
    answer = await client.post(request.path, content=request.body, headers=headers)
    assert answer.status_code == request.status, answer.text
    assert not renderers.render


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", ASK | {"prompt": english(20_000)}),
        ("/v1/completions", ASK | {"prompt": [1] * 20_000}),
        ("/v1/completions", ASK | {"prompt": "a", "structured_outputs": {"regex": "(a|b)"}}),
        (
            "/v1/chat/completions",
            ASK | {"messages": [{"role": "user", "content": english(20_000)}]},
        ),
    ],
    ids=["text", "token ids", "a form, however small", "a chat"],
)
async def test_what_takes_long_is_done_beside_the_event_loop(
    client: httpx.AsyncClient, engine: Any, renderers: ThreadsOf, path: str, body: Any
) -> None:
    engine.max_model_len = 40_000
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert renderers.render
    assert threading.get_ident() not in renderers.render


async def test_small_requests_are_rendered_at_once(
    client: httpx.AsyncClient, renderers: ThreadsOf
) -> None:
    await client.post("/v1/completions", json=ASK | {"prompt": english(INLINE_BYTES // 2)})
    assert renderers.render == {threading.get_ident()}


async def test_an_engine_without_room_is_asked_before_the_work(
    client: httpx.AsyncClient, engine: Any, renderers: ThreadsOf
) -> None:
    def full(*_: Any) -> None:
        raise EngineOverloadedError("4096 requests are open already; retry later")

    engine.check_admission = full
    answer = await client.post("/v1/completions", json=ASK | {"prompt": english(20_000)})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert not renderers.render


async def test_the_many_prompts_of_a_request_begin_in_turn_with_others_work(
    client: httpx.AsyncClient, engine: Any
) -> None:
    body = ASK | {"prompt": [[1]] * 500}
    asking = asyncio.create_task(client.post("/v1/completions", json=body))
    begun = [0]
    while len(engine.seen) < 500:
        await asyncio.sleep(0)
        begun.append(len(engine.seen))
    assert max(after - before for before, after in pairwise(begun)) <= 2 * BEGUN_AT_ONCE
    answer = await asking
    assert len(answer.json()["choices"]) == 500


async def test_one_client_with_many_large_requests_is_told_to_wait(
    client: httpx.AsyncClient, engine: Any
) -> None:
    may_go_on = threading.Event()
    render = engine.renderer.render_prompt

    def slow(prompt: Any) -> Any:
        assert may_go_on.wait(PATIENCE_S)
        return render(prompt)

    engine.renderer.render_prompt = slow
    body = json.dumps(ASK | {"prompt": english(3 << 20)})
    room = MAX_WAITING_BYTES // 2 // len(body)
    headers = {"content-type": "application/json"}

    async def ask() -> int:
        return (await client.post("/v1/completions", content=body, headers=headers)).status_code

    asking = [asyncio.create_task(ask()) for _ in range(room + 12)]
    done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    assert {each.result() for each in done} == {503}
    may_go_on.set()
    statuses = await asyncio.gather(*asking)
    assert set(statuses) == {400, 503}, "they are longer than the context"
    assert statuses.count(400) >= room


async def test_long_prompts_are_remembered_by_who_sent_them(
    engine: Any, text_renderer: TextRenderer, tmp_path: Path
) -> None:
    (tmp_path / "alice").write_text("sesame")
    (tmp_path / "bob").write_text("open-up")
    engine.renderer, engine.max_model_len = copy(text_renderer), 40_000
    engine.renderer.tokenizer = tokenizer = Tokenizer(text_renderer.get_tokenizer().backend)
    app = build_app(engine, api_keys=ApiKeys(tmp_path))
    grew = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        for key, salt in (
            ("sesame", None), ("sesame", None), ("open-up", None), ("sesame", "pepper"),
            ("open-up", "pepper"), ("sesame", "pepper"),
        ):  # fmt: skip
            before = tokenizer.remembered.num_bytes
            answer = await client.post(
                "/v1/completions",
                json=ASK | {"prompt": english(20_000), "cache_salt": salt},
                headers={"authorization": f"Bearer {key}"},
            )
            assert answer.status_code == 200, answer.text
            grew.append(tokenizer.remembered.num_bytes > before)
    assert grew == [True, False, True, True, True, False]
