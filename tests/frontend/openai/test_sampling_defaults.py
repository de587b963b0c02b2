"""How an answer is sampled whose request does not say: request, then service, then model."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from engine_kit.echo_engine import EchoEngine

from diptych_frontend.app import build_app
from diptych_protocol import SamplingDefaults

SERVICE = SamplingDefaults(temperature=0.2, top_k=0)
MODEL = SamplingDefaults(temperature=0.8, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT | {"max_tokens": 4},
    "/v1/responses": {"input": "hello"},
}


def client_of(engine: EchoEngine) -> httpx.AsyncClient:
    engine.renderer.sampling = MODEL  # type: ignore[attr-defined]
    transport = httpx.ASGITransport(build_app(engine, sampling=SERVICE))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.mark.parametrize("path", ROUTES)
async def test_a_request_comes_before_the_service_and_the_service_before_the_model(
    engine: EchoEngine, path: str
) -> None:
    body = {"model": "echo", **ROUTES[path]}
    async with client_of(engine) as client:
        for asked in ({}, {"temperature": 1.0, "top_p": 1.0}):
            answer = await client.post(path, json=body | asked)
            assert answer.status_code == 200, answer.text
    (_, silent, *_), (_, asking, *_) = engine.seen
    for params, temperature, top_p in ((silent, 0.2, 0.9), (asking, 1.0, 1.0)):
        assert (params.temperature, params.top_p) == (temperature, top_p)
        assert (params.top_k, params.min_p, params.repetition_penalty) == (0, 0.05, 1.1)


async def test_clients_can_read_what_they_get(engine: EchoEngine) -> None:
    async with client_of(engine) as client:
        [card] = (await client.get("/v1/models")).json()["data"]
        response = await client.post("/v1/responses", json={"model": "echo", "input": "hello"})
    assert card["sampling"] == {
        "temperature": 0.2, "top_p": 0.9, "top_k": 0, "min_p": 0.05, "repetition_penalty": 1.1,
    }  # fmt: skip
    assert (response.json()["temperature"], response.json()["top_p"]) == (0.2, 0.9)


async def test_without_a_word_the_whole_distribution_is_sampled(
    engine: EchoEngine, http: httpx.AsyncClient
) -> None:
    await http.post("/v1/chat/completions", json={"model": "echo", **CHAT})
    [(_, params, *_)] = engine.seen
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
