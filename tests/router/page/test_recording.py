"""The page as the site of the documents has it, which plays a recorded run without a service."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser_kit import CHROMIUM, WITHOUT_CHROMIUM, chromium
from docs.site_links import PAGE, ROOT, recorded_page
from playwright.sync_api import expect

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT_CHROMIUM)
RUN = ROOT / "docs" / "casts" / "page.json"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Requests are no news."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The files of the site that the recorded page needs, and nothing else behind them."""
    shutil.copytree(PAGE, tmp_path / "live" / "ui")
    (tmp_path / "live" / "index.html").write_text(recorded_page())
    (tmp_path / "casts").mkdir()
    shutil.copy(RUN, tmp_path / "casts")
    serve = functools.partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/live/index.html"
        server.shutdown()


def test_a_recorded_run_plays_to_its_end_without_a_service(site: str) -> None:
    run = json.loads(RUN.read_text())
    asked = [deed["ask"] for deed in run["deeds"] if "ask" in deed]
    [victim] = [deed["kill"] for deed in run["deeds"] if "kill" in deed]
    last_ms = max(at for answer in run["answers"] for at, _ in answer["pieces"])
    with chromium() as browser, browser.new_context() as context:
        page = context.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(request.url))
        page.clock.install()
        page.goto(site)
        card = page.locator(f'.engine[data-name="{victim}"]')
        expect(card).to_have_attribute("data-state", "ok")
        page.get_by_role("button", name="Play", exact=True).click()
        page.clock.run_for(last_ms + 1000)
        expect(page.get_by_role("button", name="Play again")).to_be_enabled()
        questions = page.locator(".message.user .text")
        assert [text.strip() for text in questions.all_inner_texts()] == asked
        for shown in page.locator(".message.assistant .text").all():
            assert shown.inner_text()
        page.click("#tour-open")
        expect(page.locator("#tour-next")).to_be_visible()
        for other in ("#tour-ask", ".tools", ".kill"):
            assert not page.locator(f"{other} >> visible=true").count()
        expect(page.locator(".setback").last).to_contain_text(victim)
        assert complaints == []


def test_no_secret_of_the_recorded_run_is_published() -> None:
    run = json.loads(RUN.read_text())
    [about] = [answer for answer in run["answers"] if answer["url"] == "/ui/api/about"]
    [[_, text]] = about["pieces"]
    assert json.loads(text)["control"]["token"] == "of a run that is over"
