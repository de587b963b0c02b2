"""Who gets in with API keys, and under which name, while their files come and go."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych_frontend.app import build_app
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.openai import api_keys, mounted
from diptych_frontend.openai.api_keys import MAX_KEYS, ApiKeys

CHAT = "/v1/chat/completions"
BODY = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "alice").write_text("sesame")
    (tmp_path / "bob").write_text("open-up\n")
    return tmp_path


def mount(directory: Path, version: str, keys: dict[str, str]) -> None:
    """What the kubelet does: a new folder, a link that is exchanged, and links through it."""
    new = directory / f"..{version}"
    new.mkdir()
    for name, key in keys.items():
        (new / name).write_text(key)
    (directory / "..data_tmp").symlink_to(new.name)
    os.replace(directory / "..data_tmp", directory / "..data")
    for name in keys:
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(Path("..data") / name)
    for former in directory.glob("[!.]*"):
        if former.name not in keys:
            former.unlink()


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def bearer(key: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"authorization": f"{scheme} {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        {}, bearer("wrong"), bearer("sesam"), bearer("sesamee"), bearer(""), bearer("SESAME"),
        {"authorization": "sesame"}, {"authorization": "Bearer"}, bearer("sesame", "Basic"),
        bearer("alice"), bearer("caf\u00e9"), {"x-api-key": "wrong"}, {"x-api-key": ""},
        bearer("wrong") | {"x-api-key": "sesame"},
    ],
)  # fmt: skip
async def test_nobody_gets_in_without_a_key(
    engine: Any, folder: Path, headers: dict[str, str]
) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    async with client(build_app(engine, api_keys=ApiKeys(folder))) as http:
        answers = [
            await http.get("/v1/models", headers=raw),
            await http.get("/nowhere", headers=raw),
            await http.post(CHAT, json=BODY, headers=raw),
            await http.post("/v1/kv_transfer/reject", json={}, headers=raw),
        ]
    for answer in answers:
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


async def test_anthropics_clients_have_their_key_in_a_header_of_its_own(
    engine: Any, folder: Path
) -> None:
    path, body = "/v1/messages", BODY
    metrics = ServerMetrics("echo")
    app = build_app(engine, api_keys=ApiKeys(folder), metrics=metrics)
    async with client(app) as http:
        assert (await http.post(path, json=body, headers={"x-api-key": "open-up"})).is_success
        assert (await http.post(path, json=body, headers=bearer("open-up"))).is_success
        refused = await http.post(path, json=body, headers={"x-api-key": "wrong"})
        text = (await http.get("/metrics")).text
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    assert 'model_name="echo",status="200",tenant="bob"} 2.0' in text


@pytest.mark.parametrize("path", ["/health", "/live", "/ping", "/metrics", "/version"])
async def test_probes_and_scrapers_need_no_key(engine: Any, folder: Path, path: str) -> None:
    async with client(build_app(engine, api_keys=ApiKeys(folder))) as http:
        assert (await http.get(path)).status_code == 200


async def test_further_paths_may_be_open_and_no_others(engine: Any, folder: Path) -> None:
    async def hello(request: Request) -> Response:
        return Response("hello")

    app = build_app(
        engine,
        api_keys=ApiKeys(folder),
        extra_routes=[Route("/hello", hello), Route("/secret", hello)],
        extra_open_paths=frozenset({"/hello"}),
    )
    async with client(app) as http:
        assert (await http.get("/hello")).text == "hello"
        assert (await http.get("/health")).status_code == 200
        for closed in ("/secret", "/hello/", "/hello/x", "/v1/models"):
            assert (await http.get(closed)).status_code == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_each_key_has_a_name_for_metrics_and_is_in_no_log(
    engine: Any, folder: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = ServerMetrics("echo")
    keys = ApiKeys(folder)
    app = build_app(engine, api_keys=keys, metrics=metrics)
    async with client(app) as http:
        for key in ("sesame", "open-up", "open-up"):
            answer = await http.post(CHAT, json=BODY, headers=bearer(key, scheme))
            assert answer.status_code == 200, answer.text
        await http.post(CHAT, json=BODY, headers=bearer("wrong", scheme))
        text = (await http.get("/metrics")).text
    counted = [line for line in text.splitlines() if line.startswith("diptych:tenant_requests_t")]
    assert counted == [
        f'diptych:tenant_requests_total{{model_name="echo",status="200",tenant="{name}"}} {count}'
        for name, count in (("alice", "1.0"), ("bob", "2.0"))
    ]
    assert not any("sesame" in record.getMessage() for record in caplog.records)


def test_keys_are_rotated_under_the_running_server(tmp_path: Path) -> None:
    mount(tmp_path, "1", {"alice": "old"})
    keys = ApiKeys(tmp_path)
    assert not keys.refresh(), "nothing has changed"
    mount(tmp_path, "2", {"alice": "old", "alice-2": "new"})
    assert keys.refresh()
    assert (keys.name_of(b"old"), keys.name_of(b"new")) == ("alice", "alice-2")
    mount(tmp_path, "3", {"alice-2": "new"})
    assert keys.refresh()
    assert (keys.name_of(b"old"), keys.name_of(b"new")) == (None, "alice-2")
    mount(tmp_path, "4", {"alice-2": "newer"})
    assert keys.refresh()
    assert (keys.name_of(b"new"), keys.name_of(b"newer")) == (None, "alice-2")


def test_no_key_lets_nobody_in_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(tmp_path / "absent")
    for _ in range(3):
        keys.refresh()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    (tmp_path / "absent").mkdir()
    for _ in range(3):
        keys.refresh()
    assert keys.name_of(b"") is None
    assert "holds no API key" in caplog.text
    assert len(caplog.records) == 2
    (tmp_path / "absent" / "alice").write_text("sesame")
    assert keys.refresh()
    assert keys.name_of(b"sesame") == "alice"
    shutil.rmtree(tmp_path / "absent")
    assert keys.refresh()
    assert keys.name_of(b"sesame") is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty", b""), ("blank", b" \n"), ("long", b"k" * 5000), ("two words", b"key"),
        ("words", b"a key"), ("lines", b"a\nb"), ("binary", b"\xff\xfe"), (".hidden", b"key"),
        ("caf\u00e9", b"key"), ("n" * 254, b"key"),
    ],
)  # fmt: skip
def test_what_is_no_key_is_left_out(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    (folder / "..2026").mkdir()
    keys = ApiKeys(folder)
    assert keys.names == ["alice", "bob"]
    assert keys.name_of(content) is None
    assert len(keys.left_out) == (name != ".hidden"), "and it is told"


def test_one_key_under_two_names_counts_as_the_first(folder: Path) -> None:
    (folder / "carol").write_text("sesame")
    keys = ApiKeys(folder)
    assert keys.name_of(b"sesame") == "alice"
    assert keys.left_out == ["the API keys alice and carol are equal; it counts as alice"]


def test_the_number_of_keys_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(MAX_KEYS):
        (tmp_path / f"client-{number}").write_text(f"key-{number}")
    keys = ApiKeys(tmp_path)
    assert len(keys.names) == MAX_KEYS
    (tmp_path / "client-x").write_text("one more")
    assert keys.refresh()
    assert keys.names == [], "rather nobody than not everybody"
    assert f"more than {MAX_KEYS} files" in caplog.text
    assert keys.left_out[0].endswith(f"more than {MAX_KEYS} files")
    (tmp_path / "client-x").unlink()
    assert keys.refresh()
    assert not keys.left_out


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """As if somebody held all that this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_uses_up_all_descriptors_takes_no_key_away(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(folder)
    with no_descriptors():
        for _ in range(3):
            assert not keys.refresh()
        assert keys.names == ["alice", "bob"]
    assert len([x for x in caplog.records if x.levelno == logging.ERROR]) == 1
    assert not keys.refresh()


def test_a_key_that_cannot_be_read_now_is_read_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is until then what it was."""
    keys = ApiKeys(folder)
    (folder / "alice").write_text("another")
    (folder / "carol").write_text("new")

    def fails(path: Path, most: int) -> bytes:
        if path.name == "alice":
            raise OSError(errno.EIO, "of the disk")
        return mounted.read(path, most)

    with monkeypatch.context() as patched:
        patched.setattr(api_keys, "read", fails)
        for _ in range(2):
            keys.refresh()
        assert keys.names == ["alice", "bob", "carol"]
        assert keys.name_of(b"sesame") == "alice"
    assert keys.refresh()
    assert keys.name_of(b"another") == "alice"
    assert keys.name_of(b"sesame") is None
    assert not keys.refresh()


def test_a_pipe_is_no_key_and_keeps_nobody_waiting(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    assert ApiKeys(folder).names == ["alice", "bob"]


def test_every_key_is_compared_whichever_is_offered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0
    real = __import__("hmac").compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        nonlocal compared
        compared += 1
        assert len(one) == len(other) == 32
        return bool(real(one, other))

    monkeypatch.setattr("diptych_frontend.openai.api_keys.hmac.compare_digest", counting)
    keys = ApiKeys(folder)
    counts = []
    for offered in (b"sesame", b"open-up", b"wrong", b"", b"s" * 9000):
        compared = 0
        keys.name_of(offered)
        counts.append(compared)
    assert counts == [2] * 5
