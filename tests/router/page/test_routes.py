"""The routes of the page behind the layers of the API: keys, errors, other sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.routing import Router

from diptych_frontend.browsers import BrowserGate, BrowserRules
from diptych_frontend.openai.api_keys import OPEN_PATHS, ApiKeys, KeyGate
from diptych_frontend.openai.asgi import Boundary
from diptych_frontend.timeline.lanes import timeline
from diptych_protocol import InvalidRequestError
from diptych_protocol.admin import Explanation, RequestReport
from diptych_router.requests.records import Records
from diptych_router.telling.explanations import Explanations
from diptych_router.telling.page.control import CONTROL_VARIABLE, Control, read_control
from diptych_router.telling.page.panels import panels_of, whose
from diptych_router.telling.page.routes import Page

ALICE, BOB = ({"authorization": f"Bearer {key}"} for key in ("sk-a", "sk-b"))
CONTROL = Control("http://127.0.0.1:9", "a-token-of-sixteen")


def explained(request_id: str, tenant: str) -> Explanation:
    """A router's memory of one request of alice and one of bob, under the same id."""
    Explanations(Records(), str, policy="", disaggregate="").explanation(request_id)
    names = {"shared": ["alice", "bob"], "of-bob": ["bob"]}.get(request_id, [])
    requests = [
        RequestReport(
            request_id=request_id, core_id=f"core of {name}", unix_time=0.0, prompt_tokens=1,
            tenant=name,
        )
        for name in names
        if name == tenant
    ]  # fmt: skip
    return Explanation(policy="p", disaggregate="d", requests=requests)


def app_of(page: Page, keys: ApiKeys) -> Any:
    gate = KeyGate(Router(page.routes()), keys, OPEN_PATHS | page.open_paths)
    browsers = BrowserGate(gate, BrowserRules(), any_host=True)
    return Boundary(browsers, on_answer=lambda *_: None)


@pytest.fixture
def page() -> Page:
    return Page(
        lambda: panels_of([], 0, 0),
        explained,
        model="m",
        images=lambda: False,
        leaving=lambda: True,
        control=CONTROL,
    )


@pytest.fixture
def http(page: Page, tmp_path: Path) -> httpx.AsyncClient:
    for name, key in (("alice", "sk-a"), ("bob", "sk-b")):
        (tmp_path / name).write_text(key)
    transport = httpx.ASGITransport(app_of(page, ApiKeys(tmp_path)))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


DATA = (
    "/ui/api/about", "/ui/api/events", "/ui/api/answers/shared", "/ui/api/timelines/shared",
)  # fmt: skip
REMEMBERED = ("answers", "timelines")


@pytest.mark.parametrize("path", DATA)
async def test_data_needs_a_key(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 401
    answer = await http.get(path, headers=ALICE)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"


async def test_files_need_none(http: httpx.AsyncClient, page: Page) -> None:
    assert "/" in page.open_paths
    for path in page.open_paths:
        assert (await http.get(path)).status_code == 200
    assert (await http.get("/ui/page.js/../x")).status_code == 401


async def test_the_first_answer_tells_what_the_service_is(http: httpx.AsyncClient) -> None:
    about = (await http.get("/ui/api/about", headers=ALICE)).json()
    assert (about["model"], about["images"]) == ("m", False)
    assert about["control"] == msgspec.to_builtins(CONTROL)
    policy = (await http.get("/")).headers["content-security-policy"]
    assert f"connect-src 'self' {CONTROL.url};" in policy


@pytest.mark.parametrize(("who", "name"), [(ALICE, "alice"), (BOB, "bob")])
async def test_everybody_sees_his_own_requests_only(
    http: httpx.AsyncClient, who: dict[str, str], name: str
) -> None:
    (known,) = (await http.get("/ui/api/answers/shared", headers=who)).json()["requests"]
    assert known["core_id"] == f"core of {name}"


@pytest.mark.parametrize(("what", "status"), [("answers", 404), ("timelines", 200)])
async def test_a_request_of_others_is_as_one_that_is_not_there(
    http: httpx.AsyncClient, what: str, status: int
) -> None:
    others = await http.get(f"/ui/api/{what}/of-bob", headers=ALICE)
    unknown = await http.get(f"/ui/api/{what}/nobodys", headers=ALICE)
    assert others.status_code == unknown.status_code == status
    assert others.json() == unknown.json()


async def test_a_timeline_is_that_of_the_record(http: httpx.AsyncClient) -> None:
    told = (await http.get("/ui/api/timelines/shared", headers=BOB)).json()
    (known,) = explained("of-bob", "bob").requests
    lanes = msgspec.to_builtins(timeline(known))["lanes"]
    assert told["timeline"]["lanes"] == lanes
    assert (told["whose"], told["engine"], told["outcome"]) == (whose(known.core_id), "", "")


@pytest.mark.parametrize("what", REMEMBERED)
async def test_an_id_that_cannot_be_one_is_refused(http: httpx.AsyncClient, what: str) -> None:
    answer = await http.get(f"/ui/api/{what}/{'x' * 300}", headers=ALICE)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "request_id"


async def test_pages_of_other_sites_take_no_place(http: httpx.AsyncClient) -> None:
    cross = {**ALICE, "sec-fetch-site": "cross-site"}
    assert (await http.get("/ui/api/events", headers=cross)).status_code == 403
    own = {**ALICE, "sec-fetch-site": "same-origin"}
    assert (await http.get("/ui/api/events", headers=own)).status_code == 200


async def test_a_stream_is_opened_by_get_only(http: httpx.AsyncClient) -> None:
    assert (await http.head("/ui/api/events", headers=ALICE)).status_code == 405
    assert (await http.post("/ui/api/events", headers=ALICE)).status_code == 405


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b'{"url": "http://127.0.0.1:9"}',
        b'{"url": "http://example.com:9", "token": "a-token-of-sixteen"}',
        b'{"url": "http://127.0.0.1:9/path", "token": "a-token-of-sixteen"}',
        b'{"url": "http://127.0.0.1:9", "token": "short"}',
    ],
)  # fmt: skip
def test_a_file_of_nonsense_is_an_error_of_the_start(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "control.json"
    file.write_bytes(content)
    monkeypatch.setenv(CONTROL_VARIABLE, str(file))
    with pytest.raises(InvalidRequestError, match=CONTROL_VARIABLE):
        read_control()


def test_the_file_names_where_engines_can_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_control() is None
    file = tmp_path / "control.json"
    file.write_bytes(msgspec.json.encode(CONTROL))
    monkeypatch.setenv(CONTROL_VARIABLE, str(file))
    assert read_control() == CONTROL
