"""Sites in a real browser, beside a server that they may or may not use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from browser_kit import CHROMIUM, WITHOUT_CHROMIUM, chromium
from engine_kit.echo_engine import EchoEngine
from free_ports import free_port
from playwright.sync_api import Browser, Page
from served import serve_http
from starlette.responses import HTMLResponse
from starlette.routing import Route, Router
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.browsers import BrowserRules

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT_CHROMIUM)

ASK = """async ([url, body]) => {
    try {
        const headers = {"content-type": "application/json", "x-stainless-os": "test"};
        const answer = await fetch(url, {method: "POST", headers, body});
        return [answer.status, answer.headers.get("x-request-id") !== null, await answer.text()];
    } catch (error) { return [0, false, String(error)]; }
}"""
BLIND = """async ([url, body]) => {
    await fetch(url, {method: "POST", mode: "no-cors", body});
}"""
READ = "async (url) => (await fetch(url)).status"
ASKED = '{"model": "echo", "prompt": "abc", "max_tokens": 2}'


class Net:
    """A server, a site that it allows, and a site that it does not know."""

    def __init__(self) -> None:
        self.engine: EchoEngine | None = None
        self.ports = {name: free_port() for name in ("server", "friend", "stranger")}

    def url(self, name: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.ports[name]}"

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        async def page(request: Any) -> HTMLResponse:
            return HTMLResponse(f'<title>site</title><a href="{self.url("server")}/docs">docs</a>')

        self.engine = EchoEngine()
        rules = BrowserRules(origins=frozenset({self.url("friend")}))
        apps: dict[str, Any] = {name: Router([Route("/", page)]) for name in self.ports}
        apps["server"] = build_app(self.engine, browsers=rules)
        listening = [asyncio.Event() for _ in apps]
        tasks = [
            asyncio.create_task(
                serve_http(app, "127.0.0.1", self.ports[name], on_ready=lambda *_, up=up: up.set())
            )
            for (name, app), up in zip(apps.items(), listening, strict=True)
        ]
        await asyncio.gather(*(up.wait() for up in listening))
        ready.set()
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    net, ready, stop = Net(), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(net.serve(ready, stop)))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield net
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)
        loop.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium("--host-resolver-rules=MAP *.example 127.0.0.1") as started:
        yield started


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    yield page
    page.close()


def seen(net: Net) -> int:
    assert net.engine is not None
    return len(net.engine.seen)


def test_a_page_of_another_site_can_neither_read_nor_ask(page: Page, net: Net) -> None:
    page.goto(net.url("stranger"))
    before = seen(net)
    asked = [net.url("server") + "/v1/completions", ASKED]
    status, _, why = page.evaluate(ASK, asked)
    assert (status, why) == (0, "TypeError: Failed to fetch")
    page.evaluate(BLIND, asked)
    assert seen(net) == before


def test_a_page_of_an_allowed_origin_can(page: Page, net: Net) -> None:
    page.goto(net.url("friend"))
    before = seen(net)
    status, has_id, text = page.evaluate(ASK, [net.url("server") + "/v1/completions", ASKED])
    assert (status, has_id) == (200, True), text
    assert seen(net) == before + 1
    status, _, text = page.evaluate(ASK, [net.url("server") + "/v1/completions", "{}"])
    assert status == 400, "its errors may be read, too"


def test_a_site_that_rebinds_its_name_reads_nothing(page: Page, net: Net) -> None:
    page.goto(net.url("server", "evil.example"))
    assert "allowedHosts" in page.content()
    before = seen(net)
    url = net.url("server", "evil.example")
    for path in ("/v1/models", "/metrics", "/v1/files", "/ui/api/about"):
        assert page.evaluate(READ, url + path) == 421
    assert page.evaluate(ASK, [f"{url}/v1/completions", ASKED])[0] == 421
    assert seen(net) == before


def test_a_link_of_another_site_leads_here(page: Page, net: Net) -> None:
    page.goto(net.url("stranger"))
    page.click("a")
    page.wait_for_url(net.url("server") + "/docs")
    assert "completions" in page.content()
