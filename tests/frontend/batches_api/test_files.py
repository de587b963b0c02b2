"""Files as users of the official client see them, what is refused, and what is forgotten."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from engine_kit.echo_engine import EchoEngine
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.batches_api import file_store, upload
from diptych_frontend.batches_api.api_types import KEPT_S

BOB = {"authorization": "Bearer key-of-bob"}


@pytest.fixture
async def server(start: Any, engine: EchoEngine) -> AsyncIterator[Any]:
    async with start(engine, max_bytes=4 << 20) as server:
        yield server


@pytest.fixture
async def ann(server: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with server.client("ann") as client:
        yield client


@pytest.fixture
async def http(server: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Without the official client's manners."""
    async with httpx.AsyncClient(base_url=server.url, headers=BOB, timeout=PATIENCE_S) as client:
        yield client


def contents(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "batches").rglob("*.data"))


async def test_a_file_comes_back_as_it_was_sent(ann: openai.AsyncOpenAI) -> None:
    content = os.urandom(1_500_000) + b"\r\n--not a boundary\r\n"
    made = await ann.files.create(file=("größe/../x.jsonl", content), purpose="batch")
    assert made.object == "file"
    assert (made.bytes, made.filename, made.purpose) == (
        len(content), "größe/../x.jsonl", "batch"
    )  # fmt: skip
    assert made.expires_at == made.created_at + KEPT_S
    assert await ann.files.retrieve(made.id) == made
    assert (await ann.files.content(made.id)).content == content
    deleted = await ann.files.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    for call in (ann.files.retrieve, ann.files.content, ann.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(made.id)


async def test_another_client_gets_404(server: Any, ann: openai.AsyncOpenAI) -> None:
    made = await ann.files.create(file=("a", b"secret"), purpose="batch")
    async with server.client("bob") as bob:
        for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)
        assert (await bob.files.list()).data == []
    assert (await ann.files.content(made.id)).content == b"secret"


async def test_without_a_key_nothing_is_taken(server: Any, tmp_path: Path) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as stranger:
        sent = await stranger.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"x")}
        )
        assert sent.status_code == 401
        for path in ("/v1/files", "/v1/batches"):
            assert (await stranger.get(path)).status_code == 401
    assert contents(tmp_path) == []


async def test_files_are_listed_in_pages(ann: openai.AsyncOpenAI) -> None:
    made = [(await ann.files.create(file=(f"{n}", b"x"), purpose="batch")).id for n in range(3)]
    assert [file.id async for file in ann.files.list(order="asc", limit=2)] == made
    assert [file.id async for file in ann.files.list(limit=1)] == made[::-1]
    page = await ann.files.list(order="asc", after=made[0], limit=1)
    assert ([file.id for file in page.data], page.has_more) == ([made[1]], True)
    assert (await ann.files.list(purpose="batch_output")).data == []
    with pytest.raises(openai.BadRequestError, match="limit"):
        await ann.files.list(limit=0)


@pytest.mark.parametrize(
    "file_id", ["..%2F..%2Fkeys%2Fann", "file-..", "file-" + "0" * 31 + ".", "batch_" + "0" * 32]
)
async def test_only_ids_of_ours_are_looked_for(http: httpx.AsyncClient, file_id: str) -> None:
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        assert (await http.get(path)).status_code == 404
    assert (await http.delete(f"/v1/files/{file_id}")).status_code == 404


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"purpose": "vision"}, 400, "purpose"),
        ({}, 400, "purpose"),
        ({"purpose": "batch", "colour": "red"}, 400, "colour"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, 400, "expires_after"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at",
             "expires_after[seconds]": "5"},
            400, "expires_after",
        ),
        ({"purpose": "b" * 2000}, 413, None),
        ({str(n): "" for n in range(9)}, 413, None),
    ],
)  # fmt: skip
async def test_a_form_that_is_wrong_leaves_nothing_behind(
    http: httpx.AsyncClient, tmp_path: Path, fields: Any, status: int, param: str | None
) -> None:
    answer = await http.post("/v1/files", data=fields, files={"file": ("a", b"x")})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    assert contents(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"", 415),
        (f"multipart/form-data; boundary={'b' * 10_000}", b"--b--\r\n", 400),
        (f"multipart/form-data; {'a=b; ' * 1000}boundary=b", b"--b--\r\n", 415),
        ("multipart/form-data; boundary=b", b"nonsense" * 100, 400),
        ("multipart/form-data; boundary=b", b"--b\r\n", 400),
        ("multipart/form-data; boundary=b", b'--b\r\nA: b; c="\xff"\r\n\r\n', 400),
        ("multipart/form-data; boundary=b", b"--b--\r\n", 400),
    ],
)
async def test_what_is_no_form_is_refused(
    http: httpx.AsyncClient, tmp_path: Path, kind: str, body: bytes, status: int
) -> None:
    answer = await http.post("/v1/files", content=body, headers={"content-type": kind})
    assert answer.status_code == status, answer.text
    assert "Error(" not in answer.json()["error"]["message"]
    assert contents(tmp_path) == []


async def test_a_form_without_a_file_is_told_so(http: httpx.AsyncClient) -> None:
    form = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = await http.post("/v1/files", content=form, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")


async def test_expires_after_says_when_a_file_goes(
    server: Any, ann: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = await ann.files.create(file=("a", b"x"), purpose="batch")
    made = await ann.files.create(
        file=("b", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600
    later = time.time() + 3601
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(openai.NotFoundError):
        await ann.files.retrieve(made.id)
    assert [file.id for file in (await ann.files.list()).data] == [kept.id]
    assert len(contents(tmp_path)) == 2
    await asyncio.to_thread(server.service.store.sweep)
    assert [path.stem for path in contents(tmp_path)] == [kept.id]


async def test_one_client_cannot_fill_the_directory(
    server: Any, ann: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    mebibyte = b"x" * (1 << 20)
    first = await ann.files.create(file=("a", mebibyte), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="room for") as caught:
        await ann.files.create(file=("b", mebibyte), purpose="batch")
    assert (caught.value.status_code, caught.value.code) == (413, "storage_full")
    async with server.client("bob") as bob:
        await bob.files.create(file=("b", mebibyte), purpose="batch")
    await ann.files.delete(first.id)
    await ann.files.create(file=("b", mebibyte), purpose="batch")
    assert len(contents(tmp_path)) == 2


async def test_who_declares_no_size_has_no_more_room_than_others(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    """Four at a time, each within the room: what they took together was kept."""

    most = 0

    async def without_length() -> AsyncIterator[bytes]:
        nonlocal most
        yield b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(30):
            yield b"x" * (1 << 19)
            most = max(most, sum(path.stat().st_size for path in contents(tmp_path)))
        yield b"\r\n--b--\r\n"

    headers = {"content-type": "multipart/form-data; boundary=b"}
    sent = [
        http.post("/v1/files", content=without_length(), headers=headers)
        for _ in range(upload.MAX_UPLOADS)
    ]
    answers = await asyncio.gather(*sent)
    assert [answer.status_code for answer in answers] == [413] * upload.MAX_UPLOADS
    assert contents(tmp_path) == []
    assert most <= (2 + 2 * upload.MAX_UPLOADS) * upload.WRITTEN_AT_ONCE


async def test_files_are_bounded_in_size_and_number(
    ann: openai.AsyncOpenAI, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(upload, "MAX_FORM_BYTES", 1000)
    with pytest.raises(openai.APIStatusError) as caught:
        await ann.files.create(file=("a", b"x" * 1001), purpose="batch")
    assert caught.value.status_code == 413

    async def without_length() -> AsyncIterator[bytes]:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(20):
            yield b"x" * 100

    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = await http.post("/v1/files", content=without_length(), headers=headers)
    assert answer.status_code == 413
    monkeypatch.setattr(upload, "MAX_FILE_BYTES", 100)
    answer = await http.post("/v1/files", files={"file": ("a", b"x" * 101)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    monkeypatch.setattr(file_store, "MAX_FILES", 1)
    await ann.files.create(file=("a", b"x"), purpose="batch")
    with pytest.raises(openai.APIStatusError) as caught:
        await ann.files.create(file=("a", b"x"), purpose="batch")
    assert caught.value.code == "too_many_files"
    assert len(contents(tmp_path)) == 1


async def test_a_client_that_sends_nothing_is_not_waited_for(
    server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(upload, "BODY_TIMEOUT_S", 0.05)
    url = httpx.URL(server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nhost: h\r\nauthorization: Bearer key-of-bob\r\n"
        b"content-type: multipart/form-data; boundary=b\r\ncontent-length: 100\r\n\r\n--b\r\n"
    )
    async with asyncio.timeout(PATIENCE_S):
        head = await reader.readuntil(b"\r\n")
    assert b" 408 " in head
    assert contents(tmp_path) == []
    writer.close()


async def test_a_client_sends_few_files_at_a_time(
    ann: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "MAX_UPLOADS", 0)
    with pytest.raises(openai.InternalServerError) as caught:
        await ann.files.create(file=("a", b"x"), purpose="batch")
    assert caught.value.status_code == 503


async def test_what_a_crash_left_is_swept_away(
    server: Any, ann: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    made = await ann.files.create(file=("a", b"x"), purpose="batch")
    [content] = contents(tmp_path)
    fresh, old = content.with_stem("file-fresh"), content.with_stem("file-old")
    partial = content.with_name("x.json.00.new")
    for path in (fresh, old, partial):
        path.write_bytes(b"x")
    long_ago = time.time() - file_store.ABANDONED_S - 1
    for path in (content, old, partial):
        os.utime(path, (long_ago, long_ago))
    await asyncio.to_thread(server.service.store.sweep)
    assert {path.stem for path in contents(tmp_path)} == {made.id, "file-fresh"}
    assert not partial.exists()


async def test_files_and_folders_are_private(ann: openai.AsyncOpenAI, tmp_path: Path) -> None:
    await ann.files.create(file=("a", b"x"), purpose="batch")
    for path in (tmp_path / "batches").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


async def test_a_server_without_a_directory_says_so(engine: EchoEngine, serve: Any) -> None:
    async with (
        serve(build_app(engine)) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches")):
            answer = await http.request(method, path)
            assert answer.status_code == 501
            assert "--batch-directory" in answer.json()["error"]["message"]


def test_a_field_may_come_in_any_pieces() -> None:
    body = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\na\r\nb\r\n--b--'
    )
    for size in (1, 2, 3, 7, len(body)):
        read = upload.UploadForm("multipart/form-data; boundary=b")
        content = b"".join(
            read.feed(body[start : start + size]) for start in range(0, len(body), size)
        )
        assert content == b"a\r\nb"
        assert (read.ended().file, read.ended().purpose) == ("f", "batch")
