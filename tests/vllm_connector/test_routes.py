"""The route for rejections in vLLM's API server, with a scheduler that does what vLLM's does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import Message
from vllm_scheduler import THERE, VllmScheduler, prompt, reference

from diptych_kv_transfer.tables.messages import Reject
from diptych_protocol.kv_transfer_params import LEASE_FIELDS
from diptych_vllm import routes
from diptych_vllm.routes import MAX_BODY_BYTES, PATH, Routes


class Engine:
    """vLLM's client of a core."""

    def __init__(self, connector: str = "DiptychConnector") -> None:
        transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config={})
        self.vllm_config = SimpleNamespace(kv_transfer_config=transfer)
        self.core = VllmScheduler()
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.failure: Exception | None = None
        self.hangs = False

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: dict[str, Any]
    ) -> None:
        if self.failure is not None:
            raise self.failure
        if self.hangs:
            await asyncio.Event().wait()
        self.told.append((request_id, kv_transfer_params))
        self.core.reject(kv_transfer_params)

    def lend(self) -> dict[str, Any]:
        """Compute a prompt for another engine. Returns the reference."""
        self.core.add(prompt("p", 9, {"do_remote_decode": True}))
        self.core.step()
        self.core.compute("p", by_length=True)
        self.core.step()
        return self.core.answers["p"]

    def steps(self) -> None:
        self.core.step()
        self.core.update(self.core.collect())

    @property
    def holds_nothing(self) -> bool:
        return not self.core.requests


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def http(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(engine) as client:
        yield client


@contextlib.asynccontextmanager
async def serving(engine: Engine | None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that has started with our middleware."""
    app = Starlette(middleware=[Middleware(Routes)])
    app.state.engine_client = engine
    events = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Message:
        return next(events)

    async def send(message: Message) -> None:
        assert message["type"].endswith(".complete"), message

    await app({"type": "lifespan"}, receive, send)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
        yield client


async def test_a_reference_frees_the_blocks_of_its_lease_and_again_nothing(
    engine: Engine, http: httpx.AsyncClient
) -> None:
    params = engine.lend()
    for _ in range(2):
        answer = await http.post(PATH, json={"kv_transfer_params": params})
        assert (answer.status_code, answer.json()) == (200, {"done": True})
        engine.steps()
        assert engine.holds_nothing
    names = {name for name, _ in engine.told}
    assert len(names) == 2, "a core dies of a name that it knows"


async def test_a_decode_engine_passes_it_on_to_the_one_that_lends(
    engine: Engine, http: httpx.AsyncClient
) -> None:
    answer = await http.post(PATH, json={"kv_transfer_params": reference(1)})
    assert answer.status_code == 200
    engine.steps()
    [driver] = engine.core.drivers
    assert driver.connecting == [THERE]
    driver.connect(well=True)
    assert [message for _, message in driver.said if isinstance(message, Reject)] == [
        Reject(f"{1:032x}")
    ]


async def test_the_lease_of_a_request_that_came_with_the_reference_is_that_request_s_affair(
    engine: Engine, http: httpx.AsyncClient
) -> None:
    engine.core.add(prompt("d", 9, reference(1)))
    engine.steps()
    answer = await http.post(PATH, json={"kv_transfer_params": reference(1)})
    assert answer.status_code == 200
    engine.steps()
    [driver] = engine.core.drivers
    driver.connect(well=True)
    assert not [message for _, message in driver.said if isinstance(message, Reject)]


async def test_the_body_of_the_lost_request_will_do_and_the_core_hears_of_the_lease_alone(
    engine: Engine, http: httpx.AsyncClient
) -> None:
    params = engine.lend() | {"remote_block_ids": "any", "of another project": [1]}
    body = {"model": "m", "prompt": "hi", "n": -1, "kv_transfer_params": params}
    assert (await http.post(PATH, json=body)).status_code == 200
    [(_, told)] = engine.told
    assert told == {name: params[name] for name in LEASE_FIELDS}


def altered(**changes: Any) -> bytes:
    return json.dumps({"kv_transfer_params": reference(1) | changes}).encode()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "truncated"),
        (b"\xff\x00", "invalid"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"kv_transfer_params": {"proof": "\\ud800"}}', ""),
        (b"[]", "Expected `object`"),
        (b"{}", "kv_transfer_params"),
        (b'{"kv_transfer_params": null}', "kv_transfer_params"),
        (b'{"kv_transfer_params": {}}', "remote_engine_id"),
        (altered(proof=None), "proof"),
        (altered(remote_port=0), "remote_port"),
        (altered(lease_id="0" * 5000), "lease_id"),
        (altered(remote_host="example.org"), "must be an IP address"),
        (altered(proof="0" * 64), "no engine of this service has signed this"),
        (altered(proof="é\u0000"), "no engine of this service has signed this"),
        (altered(remote_host="192.0.2.1"), "no engine of this service has signed this"),
        (altered(lease_id="f" * 32), "no engine of this service has signed this"),
        (altered(expires_at=1 << 52), "no engine of this service has signed this"),
    ],
)
async def test_what_no_engine_has_signed_is_refused_and_does_not_reach_the_core(
    engine: Engine, http: httpx.AsyncClient, body: bytes, says: str
) -> None:
    answer = await http.post(PATH, content=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert engine.told == []


async def test_a_field_that_is_wrong_is_named(http: httpx.AsyncClient) -> None:
    answer = await http.post(PATH, content=altered(epoch="another"))
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error", "kv_transfer_params", 400,
    )  # fmt: skip


@pytest.mark.parametrize("more", [0, 1])
async def test_a_body_is_read_up_to_a_limit(
    engine: Engine, http: httpx.AsyncClient, more: int
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        body = json.dumps({"kv_transfer_params": engine.lend()}).encode()
        yield body
        yield b" " * (MAX_BODY_BYTES - len(body) + more)

    answer = await http.post(PATH, content=pieces())
    assert answer.status_code == (413 if more else 200)
    assert len(engine.told) == 1 - more


async def test_a_core_that_is_dead_is_an_error(engine: Engine, http: httpx.AsyncClient) -> None:
    params = engine.lend()
    engine.failure = RuntimeError("a secret of the process")
    answer = await http.post(PATH, json={"kv_transfer_params": params})
    assert answer.status_code == 500
    assert "secret" not in answer.text


async def test_a_front_end_that_does_not_get_through_to_its_core_says_so(
    engine: Engine, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "NOTIFY_S", 0.01)
    engine.hangs = True
    answer = await http.post(PATH, json={"kv_transfer_params": engine.lend()})
    assert answer.status_code == 503


@pytest.mark.parametrize("engine", [Engine("NixlConnector"), None], ids=["nixl", "no engine"])
async def test_a_server_without_our_connector_does_not_have_the_route(
    engine: Engine | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(engine) as http:
        assert (await http.post(PATH, json={})).status_code == 404
    assert "DiptychConnector" in caplog.text


async def test_other_methods_and_paths_are_as_they_were(http: httpx.AsyncClient) -> None:
    assert (await http.get(PATH)).status_code == 405
    assert (await http.post("/v1/completions")).status_code == 404
