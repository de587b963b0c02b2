"""Images on the page, in a real browser, with a model that takes them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from browser_kit import CHROMIUM, WITHOUT_CHROMIUM, chromium, laptop, shown_service
from free_ports import free_port
from model_kit.pictures import encoded, image_part, picture
from model_kit.seeing import Published
from page_scenes import DECODING, Scene
from playwright.sync_api import expect
from waits import PATIENCE_S

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT_CHROMIUM),
    pytest.mark.timeout(600),
]
TOKENS = 12
TOO_LARGE = b"\x89PNG" + bytes(2 << 20)


def test_an_image_is_shown_and_asked_about(tmp_path: Path) -> None:
    published = Published(tmp_path / "model")
    seen, other = (encoded(picture(seed)) for seed in (1, 2))
    complaints: list[str] = []
    run = tmp_path / "run"
    run.mkdir()
    service = shown_service(f"file://{published.uri}")
    service["spec"]["decode"]["replicas"] = 1
    with laptop(run, service, free_port()) as running, chromium() as browser:
        with Scene.opened(browser, running.url) as scene:
            page = scene.page
            page.on("console", lambda said: complaints.append(said.text))
            expect(scene.card(DECODING[0])).to_have_attribute("data-state", "ok")
            scene.set_numbers(temperature=0, max_tokens=TOKENS)
            answers = []
            for content in (seen, other):
                page.click("#clear")
                choose(scene, content)
                scene.ask("what?")
                expect(page.locator(".message.user img").last).to_be_visible()
                scene.wait_for_end()  # only now: the image is read before the answer begins
                answers.append(scene.written.strip())
            choose(scene, TOO_LARGE)
            scene.ask("what?")
            expect(page.locator("#problem")).to_contain_text("2 MiB")
        assert answers == [asked(running.url, content) for content in (seen, other)]
        assert answers[0] != answers[1], "else the image would not matter"
    assert complaints == []


def choose(scene: Scene, content: bytes) -> None:
    scene.page.set_input_files(
        "#image", {"name": "seen.png", "mimeType": "image/png", "buffer": content}
    )
    expect(scene.page.locator("#picked")).to_contain_text("seen.png")


def asked(url: str, content: bytes) -> str:
    """What the API answers to the same question, as the browser shows it."""
    parts = [image_part(content), {"type": "text", "text": "what?"}]
    body = {
        "model": httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"][0]["id"],
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0,
        "max_tokens": TOKENS,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"]).strip()
