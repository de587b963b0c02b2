"""The first document, from the other side: engines that implement it serve under our server."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any

import httpx
import pytest
from cases import each
from documents_kit.implementers import DocumentedClient, NewerClient
from waits import PATIENCE_S

from diptych_frontend.app import build_app

EngineClient: Any = import_module("diptych_engine.as_vllm.engine.protocol").EngineClient
Heir: Any = type("Heir", (DocumentedClient, EngineClient), {})
KINDS = {"alike": DocumentedClient, "heir": Heir, "newer": NewerClient}
CHAT = {"model": "echo", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
LEASE = {"do_remote_prefill": True, "remote_engine_id": "p"}
# fmt: off
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "echo", "prompt": "abc", "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": "echo", "messages": CHAT["messages"]},
    "/v1/responses": {"model": "echo", "input": "hi", "max_output_tokens": 16},
    "/v1/responses/input_tokens": {"model": "echo", "input": "hi"},
    "/v1/embeddings": {"model": "echo", "input": ["abc", "d"]},
    "/score": {"model": "echo", "text_1": "abc", "text_2": "abd"},
    "/rerank": {"model": "echo", "query": "abc", "documents": ["abd", "x"]},
    "/tokenize": {"model": "echo", "prompt": "abc"},
    "/detokenize": {"model": "echo", "tokens": [97, 98]},
    "/v1/kv_transfer/reject": {"kv_transfer_params": LEASE},
}
# fmt: on


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]()


@pytest.fixture
async def http(engine: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(engine))
    base_url = "http://engine"
    async with httpx.AsyncClient(
        transport=transport, base_url=base_url, timeout=PATIENCE_S
    ) as client:
        yield client


def test_the_implementer_has_the_documents_members_and_no_others() -> None:
    own = {name for name in vars(DocumentedClient) if not name.startswith("_")}
    assert own == EngineClient.__abstractmethods__
    assert not issubclass(DocumentedClient, EngineClient)
    assert "tenant" not in inspect.signature(Heir.generate).parameters


@each("route", ROUTES)
async def test_every_route_is_served(http: httpx.AsyncClient, route: str) -> None:
    answer = await http.post(route, json=ROUTES[route])
    assert answer.status_code == 200, answer.text


@each("route", ["/v1/models", "/health", "/live", "/metrics", "/openapi.json"])
async def test_what_is_only_read_is_there(http: httpx.AsyncClient, route: str) -> None:
    assert (await http.get(route)).status_code == 200


async def test_streams_and_several_prompts_are_served(http: httpx.AsyncClient) -> None:
    stream = (await http.post("/v1/chat/completions", json=CHAT | {"stream": True})).text
    chunks = [
        line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data")
    ]
    assert chunks.pop() == "[DONE]"
    deltas = [json.loads(chunk)["choices"][0]["delta"].get("content") for chunk in chunks]
    assert "".join(filter(None, deltas)) == "user"
    ask = {"model": "echo", "prompt": ["abc", "xyz"], "max_tokens": 3}
    two = (await http.post("/v1/completions", json=ask)).json()
    assert [choice["text"] for choice in two["choices"]] == ["abc", "xyz"]


async def test_a_large_request_is_served(http: httpx.AsyncClient) -> None:
    """Before its work is begun, the engine is asked for room."""
    ask = ROUTES["/v1/completions"] | {"prompt": "x" * 2000, "stop": ["y" * 200] * 4}
    assert (await http.post("/v1/completions", json=ask)).status_code == 200


async def test_a_refused_hand_off_is_told_to_the_engine(
    http: httpx.AsyncClient, engine: Any
) -> None:
    ask = ROUTES["/v1/completions"] | {"model": "no such", "kv_transfer_params": LEASE}
    assert (await http.post("/v1/completions", json=ask)).status_code == 404
    [(_, told)] = engine._echo.rejected
    assert told == LEASE


async def test_an_engine_that_counts_its_requests_is_asked_by_their_name() -> None:
    engine = NewerClient()
    transport = httpx.ASGITransport(build_app(engine))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        headers = {"X-Request-Id": "mine"}
        await client.post("/v1/completions", json=ROUTES["/v1/completions"], headers=headers)
    assert engine.asked == [(1, "mine")]
