"""Orders to kill an engine: from the page of this run, with its token, and no others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from diptych.laptop.kill_switch import KillSwitch, origins_of

URL = "http://127.0.0.1:8080/v1"
PAGE = "http://127.0.0.1:8080"


@dataclass
class Spec:
    name: str
    role: str
    ports: dict[str, int] = field(default_factory=dict)


@dataclass
class Pod:
    """A running pod, as far as it can be killed."""

    spec: Spec
    pid: int | None = 7
    killed: int = 0

    def kill(self) -> None:
        self.killed += 1


class Laptop:
    def __init__(self) -> None:
        self.pods = [
            Pod(Spec("svc-decode-0", "decode", {"http": 9000})),
            Pod(Spec("svc-prefill-0", "prefill"), pid=None),
            Pod(Spec("svc-router-0", "router")),
        ]
        pods: Any = self.pods
        self.switch = KillSwitch(pods, URL)
        self.token = self.switch.reached_at(1).token

    async def order(
        self, name: str, method: str = "POST", *, token: str = "", origin: str = PAGE
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {token or self.token}", "origin": origin}
        if method == "OPTIONS":
            headers["access-control-request-method"] = "POST"
            headers["access-control-request-headers"] = "authorization"
        transport = httpx.ASGITransport(self.switch.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, f"/engines/{name}/kill", headers=headers)

    @property
    def killed(self) -> list[str]:
        return [pod.spec.name for pod in self.pods for _ in range(pod.killed)]


@pytest.fixture
def laptop() -> Laptop:
    return Laptop()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_the_page_kills_an_engine_by_its_name(laptop: Laptop, host: str) -> None:
    origin = f"http://{host}:8080"
    answer = await laptop.order("svc-decode-0", origin=origin)
    assert (answer.status_code, answer.json()) == (200, {"killed": "svc-decode-0"})
    assert answer.headers["access-control-allow-origin"] == origin
    assert laptop.killed == ["svc-decode-0"]


@pytest.mark.parametrize(
    "origin",
    [
        "null", "http://evil.example", "http://127.0.0.1:8081", "https://127.0.0.1:8080",
        "http://127.0.0.1:8080.evil.example", "http://127.0.0.1", "",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
async def test_no_other_site_may(laptop: Laptop, origin: str, method: str) -> None:
    answer = await laptop.order("svc-decode-0", method, origin=origin)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    assert laptop.killed == []


async def test_nobody_may_without_the_token_of_this_run(laptop: Laptop) -> None:
    answer = await laptop.order("svc-decode-0", token=Laptop().token)
    assert answer.status_code == 401
    assert laptop.killed == []


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("svc-router-0", 404, "no engine here is called 'svc-router-0'"),
        ("stranger", 404, "no engine here is called 'stranger'"),
        ("x" * 500, 404, "no engine here"),
        ("svc-prefill-0", 409, "svc-prefill-0 does not run now"),
    ],
)
async def test_only_engines_that_run_can_be_killed_and_the_page_may_read_why_not(
    laptop: Laptop, name: str, status: int, says: str
) -> None:
    answer = await laptop.order(name)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert laptop.killed == []


async def test_a_browser_may_ask_beforehand(laptop: Laptop) -> None:
    answer = await laptop.order("svc-decode-0", "OPTIONS")
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-headers"] == "authorization"
    assert laptop.killed == []


async def test_other_methods_are_refused(laptop: Laptop) -> None:
    assert (await laptop.order("svc-decode-0", "GET")).status_code == 405
    assert laptop.killed == []


@pytest.mark.parametrize(
    ("url", "first"),
    [
        ("http://127.0.0.1:80/v1", "http://127.0.0.1"),
        ("https://127.0.0.1:443/v1", "https://127.0.0.1"),
        ("https://[::1]:8443/v1", "https://127.0.0.1:8443"),
        ("http://localhost:443/v1", "http://127.0.0.1:443"),
    ],
)
def test_browsers_leave_out_the_usual_port(url: str, first: str) -> None:
    assert first in origins_of(url)
    assert len(origins_of(url)) == 3
