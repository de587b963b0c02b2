"""Images are prepared in a lane of their own, and only as long as somebody waits for them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from chaos_kit.large_requests import english
from model_kit.pictures import image_part, picture
from waits import PATIENCE_S, wait_until

from diptych_frontend.app import build_app
from diptych_frontend.confined.cancellation import WorkCancelledError, current_cancellation
from diptych_frontend.openai import request_workers

ASK = {"model": "echo", "max_tokens": 1}
SEEN = {"role": "user", "content": [image_part(picture(1, 8, 8))] * 31}
IMAGES = ASK | {"messages": [SEEN]}
TEXT = ASK | {"messages": [{"role": "user", "content": english(5000)}]}


class SlowImages:
    """Prepares no image before `may_go_on`, unless the work is ended."""

    def __init__(self, engine: Any) -> None:
        self.may_go_on = threading.Event()
        self.begun = 0
        self.ended = 0
        self._render = engine.renderer.render_chat
        engine.renderer.render_chat = self.render_chat

    def render_chat(self, messages: Any, **options: Any) -> Any:
        if isinstance(messages[0]["content"], str):
            return self._render(messages, **options)
        self.begun += 1
        with current_cancellation().ending_by(self._end):
            assert self.may_go_on.wait(PATIENCE_S)
        if current_cancellation().cancelled:
            raise WorkCancelledError
        return self._render([{"role": "user", "content": "a"}], **options)

    def _end(self) -> None:
        self.ended += 1
        self.may_go_on.set()


@pytest.fixture
def images(engine: Any) -> SlowImages:
    return SlowImages(engine)


def client_at(app: Any, address: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, client=(address, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=PATIENCE_S)


async def test_no_text_waits_behind_images(engine: Any, images: SlowImages) -> None:
    engine.max_model_len = 10_000
    app = build_app(engine)
    async with client_at(app, "1.1.1.1") as one, client_at(app, "2.2.2.2") as two:
        asking = [
            asyncio.create_task(client.post("/v1/chat/completions", json=IMAGES))
            for client in (one, two)
            for _ in range(31)
        ]
        await asyncio.to_thread(
            wait_until, lambda: images.begun == 2, "one request of each client is prepared"
        )
        async with client_at(app, "3.3.3.3") as third:
            answer = await third.post("/v1/chat/completions", json=TEXT)
        assert answer.status_code == 200, answer.text
        assert images.begun == 2
        assert not any(task.done() for task in asking)
        images.may_go_on.set()
        answers = await asyncio.gather(*asking)
    assert {answer.status_code for answer in answers} == {200}


async def test_work_ends_with_the_client_that_waits_for_it(
    engine: Any, images: SlowImages, serve: Any
) -> None:
    async with (
        serve(build_app(engine)) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=IMAGES))
        await asyncio.to_thread(wait_until, lambda: images.begun == 1, "the images are prepared")
        asking.cancel()  # which closes its connection
        await asyncio.to_thread(wait_until, lambda: images.ended == 1, "the work is ended")


async def test_work_ends_when_its_time_is_up(
    engine: Any, images: SlowImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_workers, "TURN_TIMEOUT_S", 0.5)
    async with client_at(build_app(engine), "1.1.1.1") as client:
        answer = await client.post("/v1/chat/completions", json=IMAGES)
    assert answer.status_code == 503, answer.text
    await asyncio.to_thread(
        wait_until, lambda: images.ended <= 1 and images.ended == images.begun, "it is ended"
    )
