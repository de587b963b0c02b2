"""Nobody gets past the admin port without a token that the Secret holds at that moment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych_frontend.admin.calls import MAX_BODY_BYTES, build_admin_app, seconds_of
from diptych_frontend.openai.exchange import decode_json
from diptych_frontend.openai.responses import json_response
from diptych_protocol import InvalidRequestError
from diptych_protocol.control_calls import StartProfile


class Waited(msgspec.Struct):
    seconds: float


async def wait(request: Request) -> Response:
    return json_response(Waited(seconds_of(request, "timeout_s", 30.0, 60.0)))


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = build_admin_app(tmp_path, [Route("/admin/wait", wait, methods=["POST"])])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        yield client


@pytest.mark.parametrize(
    ("files", "authorization", "status"),
    [
        ({"admin-token": "new"}, "Bearer new", 200),
        ({"admin-token": "new\n"}, "Bearer new", 200),
        ({"admin-token": "new", "previous-admin-token": "old"}, "Bearer new", 200),
        ({"admin-token": "new", "previous-admin-token": "old"}, "Bearer old", 200),
        ({"admin-token": "new"}, "Bearer old", 401),
        ({"admin-token": "new"}, "new", 401),
        ({"admin-token": "new"}, "Bearer ", 401),
        ({"admin-token": "new"}, None, 401),
        ({"admin-token": ""}, "Bearer ", 401),
        ({"admin-token": "\n"}, "Bearer", 401),
        ({}, "Bearer ", 401),
        ({"admin-token": "new"}, "Bearer caf\u00e9", 401),
    ],
)
async def test_a_token_of_the_secret_opens(
    tmp_path: Path,
    http: httpx.AsyncClient,
    files: dict[str, str],
    authorization: str | None,
    status: int,
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    for path in ("/admin/wait", "/nowhere"):
        answer = await http.post(path, headers=headers)
        known = path == "/admin/wait"
        assert answer.status_code == (status if known or status == 401 else 404)
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_admin_token"
        assert b"new" not in answer.content


async def test_the_files_are_read_anew_for_each_request(
    tmp_path: Path, http: httpx.AsyncClient
) -> None:
    async def status(token: str) -> int:
        headers = {"authorization": f"Bearer {token}"}
        return (await http.post("/admin/wait", headers=headers)).status_code

    token, previous = tmp_path / "admin-token", tmp_path / "previous-admin-token"
    assert await status("one") == 401
    token.write_text("one")
    assert await status("one") == 200
    token.write_text("two")
    previous.write_text("one")
    assert [await status("one"), await status("two")] == [200, 200]
    previous.unlink()
    assert [await status("one"), await status("two")] == [401, 200]


@pytest.mark.parametrize(
    ("query", "status", "seconds"),
    [
        ("", 200, 30), ("?timeout_s=0", 200, 0), ("?timeout_s=1.5", 200, 1.5),
        ("?timeout_s=61", 400, 0), ("?timeout_s=-1", 400, 0), ("?timeout_s=nan", 400, 0),
        ("?timeout_s=soon", 400, 0), ("?timeout_s=", 400, 0),
    ],
)  # fmt: skip
async def test_seconds_are_checked(
    tmp_path: Path, http: httpx.AsyncClient, query: str, status: int, seconds: float
) -> None:
    (tmp_path / "admin-token").write_text("t")
    answer = await http.post(f"/admin/wait{query}", headers={"authorization": "Bearer t"})
    assert answer.status_code == status
    if status == 200:
        assert answer.json() == {"seconds": seconds}
    else:
        assert answer.json()["error"]["param"] == "timeout_s"


async def test_wrong_methods_and_large_bodies_are_refused(
    tmp_path: Path, http: httpx.AsyncClient
) -> None:
    (tmp_path / "admin-token").write_text("t")
    headers = {"authorization": "Bearer t"}
    assert (await http.get("/admin/wait", headers=headers)).status_code == 405
    large = await http.post("/admin/wait", headers=headers, content=b"x" * (MAX_BODY_BYTES + 1))
    assert large.status_code == 413


def test_what_a_call_says_of_its_own_field_is_told_with_its_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"^profile_prefix must be") as caught:
        decode_json(b'{"profile_prefix": "../x"}', msgspec.json.Decoder(StartProfile))
    assert caught.value.param == "profile_prefix"
