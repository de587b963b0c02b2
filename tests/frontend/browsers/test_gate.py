"""The layer in front of the whole API: what a site that rebinds its name gets, forms of other
sites, and CORS as browsers ask for it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_kit.echo_engine import EchoEngine

from diptych_frontend.app import build_app
from diptych_frontend.batches_api.batch_run import Manners
from diptych_frontend.batches_api.service import BatchService
from diptych_frontend.browsers import BrowserRules
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.openai.api_keys import ApiKeys
from diptych_frontend.probes import build_probe_app
from diptych_protocol.config import Batches

FRIEND = "https://app.example.com"
ASKED = {"model": "echo", "prompt": "abc", "max_tokens": 2}
FORM = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n--b--\r\n'
)
MULTIPART = {"content-type": "multipart/form-data; boundary=b"}

Clients = Callable[..., contextlib.AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def client(tmp_path: Path) -> Clients:
    """`client(**options of the app)`: an async context with a client of a server with batches."""

    @contextlib.asynccontextmanager
    async def made(**options: Any) -> AsyncIterator[httpx.AsyncClient]:
        engine = EchoEngine()
        metrics = ServerMetrics(engine.model_name)
        folder = tmp_path / "batches"
        batches = BatchService(folder, Batches(), metrics, Manners(is_client=lambda _: True))
        app = build_app(engine, metrics=metrics, batches=batches, **options)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as http:
            yield http
        await batches.close()

    return made


def stored(tmp_path: Path) -> list[Path]:
    files = (path for path in (tmp_path / "batches").rglob("*") if path.is_file())
    return [path for path in files if not path.name.startswith(".")]


async def test_a_site_that_rebinds_its_name_gets_nothing(client: Clients, tmp_path: Path) -> None:
    headers = {"host": "evil.example", "origin": "http://evil.example"}
    async with client() as http:
        for path in ("/", "/v1/models", "/v1/files", "/metrics", "/version", "/openapi.json"):
            answer = await http.get(path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (421, "Host"), path
        answer = await http.post("/v1/completions", json=ASKED, headers=headers)
        assert answer.status_code == 421
        answer = await http.post("/v1/messages", json=ASKED, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (421, "error")
        answer = await http.post("/v1/files", content=FORM, headers=MULTIPART | headers)
        assert answer.status_code == 421
        assert (await http.get("/health", headers=headers)).status_code == 200
    assert stored(tmp_path) == []


async def test_a_name_that_is_sent_twice_is_refused(client: Clients) -> None:
    """Another reader of the request might believe the other one."""
    async with client() as http:
        for hosts in (["127.0.0.1", "evil.example"], ["evil.example", "127.0.0.1"]):
            answer = await http.get("/v1/models", headers=[("host", host) for host in hosts])
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Host")


async def test_an_engines_own_port_is_behind_the_layer_too() -> None:
    engine = EchoEngine()
    transport = httpx.ASGITransport(build_probe_app(engine, ServerMetrics("echo")))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        assert (await http.get("/metrics")).status_code == 200
        evil = {"host": "evil.example"}
        assert (await http.get("/metrics", headers=evil)).status_code == 421
        assert (await http.get("/live", headers=evil)).status_code == 200


async def test_with_api_keys_any_name_is_answered_because_no_site_has_a_key(
    client: Clients, tmp_path: Path
) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "ann").write_text("key-of-ann")
    headers = {"host": "evil.example", "origin": "http://evil.example"}
    async with client(api_keys=ApiKeys(tmp_path / "keys")) as http:
        answer = await http.post("/v1/completions", json=ASKED, headers=headers)
        assert answer.status_code == 401
        key = {"authorization": "Bearer key-of-ann"}
        answer = await http.post("/v1/completions", json=ASKED, headers=headers | key)
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "site",
    [
        {"sec-fetch-site": "cross-site", "origin": "http://evil.example"},
        {"origin": "http://evil.example"},
        {"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:3000"},
    ],
)
async def test_a_form_of_another_site_changes_nothing(
    client: Clients, tmp_path: Path, site: dict[str, str]
) -> None:
    async with client() as http:
        answer = await http.post("/v1/files", content=FORM, headers=MULTIPART | site)
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, "Origin")
        for path in ("/v1/completions", "/v1/messages", "/tokenize", "/v1/batches"):
            plain = {"content-type": "text/plain"} | site
            assert (await http.post(path, content=b"{}", headers=plain)).status_code == 403, path
        answer = await http.delete("/v1/files/file-" + "0" * 32, headers=site)
        assert answer.status_code == 403
        assert stored(tmp_path) == []
        answer = await http.post("/v1/files", content=FORM, headers=MULTIPART)
        assert answer.status_code == 200


async def test_cors_is_off_by_default(client: Clients) -> None:
    async with client() as http:
        answer = await http.get("/v1/models")
        assert not [name for name in answer.headers if name.startswith("access-control")]
        asks = {"origin": FRIEND, "access-control-request-method": "POST"}
        answer = await http.options("/v1/completions", headers=asks)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


async def test_an_allowed_origin_may_ask_beforehand_without_a_key_and_read_what_it_gets(
    client: Clients, tmp_path: Path
) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "ann").write_text("key-of-ann")
    rules = BrowserRules(origins=frozenset({FRIEND}))
    async with client(browsers=rules, api_keys=ApiKeys(tmp_path / "keys")) as http:
        asks = {
            "origin": FRIEND, "sec-fetch-site": "cross-site",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
        }  # fmt: skip
        answer = await http.options("/v1/completions", headers=asks)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == FRIEND
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
        site = {"origin": FRIEND, "sec-fetch-site": "cross-site"}
        refused = await http.post("/v1/completions", json=ASKED, headers=site)
        key = {"authorization": "Bearer key-of-ann"}
        served = await http.post("/v1/completions", json=ASKED, headers=site | key)
        streamed = await http.post(
            "/v1/completions", json=ASKED | {"stream": True}, headers=site | key
        )
        assert [each.status_code for each in (refused, served, streamed)] == [401, 200, 200]
        for each in (answer, refused, served, streamed):
            assert each.headers["access-control-allow-origin"] == FRIEND
            assert each.headers["vary"] == "origin"
        own = await http.get("/v1/models", headers=key)
        assert own.headers["vary"] == "origin"
        assert "access-control-allow-origin" not in own.headers
        other = await http.get("/v1/models", headers=key | {"origin": "https://evil.example"})
        assert other.status_code == 403
