"""The page in a real browser, in front of `diptych up` with the real model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser_kit import (
    CHROMIUM,
    WITHOUT_CHROMIUM,
    Laptop,
    chromium,
    difference,
    laptop,
    shown_service,
)
from free_ports import free_port
from model_kit.questions import WHOLE
from page_scenes import DECODING, DESK, LONG, PHONE, Scene
from playwright.sync_api import Browser, Page, expect
from waits import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT_CHROMIUM),
    pytest.mark.timeout(600),
]

KEYS = {"alice": "sk-of-alice", "bob": "sk-of-bob"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> Iterator[Laptop]:
    keys = tmp_path_factory.mktemp("keys")
    for name, key in KEYS.items():
        (keys / name).write_text(key)
    folder = tmp_path_factory.mktemp("run")
    with laptop(folder, shown_service(smollm2), free_port(), "--api-keys", str(keys)) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


Open = Callable[..., Scene]


@pytest.fixture
def open_page(service: Laptop, browser: Browser) -> Iterator[Open]:
    """Open the page, as a browser with these options, and give it alice's key. What the browser
    complains about, such as what the policy forbids, fails the test."""
    complaints: list[str] = []
    contexts = []

    def opened(*, key: str | None = KEYS["alice"], **options: Any) -> Scene:
        context = browser.new_context(**{"viewport": DESK, **options})
        contexts.append(context)
        page = context.new_page()
        scene = Scene(page)
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if is_bad(said) else None)
        page.goto(service.url)
        if key is not None:
            enter(page, key)
            expect(page.locator("#door")).to_be_hidden()
            scene.set_numbers(temperature=0)
        return scene

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def is_bad(said: Any) -> bool:
    """Refusals that a test provokes are the server's answers, and no mistakes of the page."""
    return said.type == "error" and "status of 401" not in said.text


def enter(page: Page, key: str) -> None:
    expect(page.locator("#door")).to_be_visible()
    page.fill("#key", key)
    page.click("#door button")


def body_of(sent: Any) -> dict[str, Any]:
    """What a request that was waited for has sent."""
    return dict(sent.value.post_data_json)


def running_requests(service: Laptop) -> float:
    lines = httpx.get(f"{service.url}/metrics", timeout=PATIENCE_S).text.splitlines()
    found = [line for line in lines if line.startswith("diptych:num_requests_running{")]
    assert found
    return sum(float(line.rpartition(" ")[2]) for line in found)


SIZES = """() => {
  window.sizes = new Set();
  new MutationObserver(() => {
    const texts = document.querySelectorAll(".message.assistant .text");
    if (texts.length) window.sizes.add(texts[texts.length - 1].textContent.length);
  }).observe(document.getElementById("log"), { subtree: true, childList: true });
}"""
"""Notes how long the answer was each time that it changed."""


def test_an_answer_comes_word_by_word(open_page: Open) -> None:
    scene = open_page()
    page = scene.page
    page.evaluate(SIZES)
    scene.ask(WHOLE.words)
    expect(scene.answer).to_have_text(WHOLE.answer)
    scene.wait_for_end()
    assert page.evaluate("() => window.sizes.size") > 3
    expect(page.locator("#status")).to_contain_text(WHOLE.answer)
    expect(page.locator("#words")).to_have_value("")


def test_stop_keeps_what_came_and_ends_the_request(open_page: Open, service: Laptop) -> None:
    scene = open_page()
    page = scene.page
    scene.set_numbers(max_tokens=2000)
    scene.ask(LONG)
    wait_until(lambda: len(scene.answer.inner_text()) > 40)
    page.click("#stop")
    scene.wait_for_end()
    kept = scene.answer.inner_text()
    assert len(kept) > 40
    wait_until(lambda: running_requests(service) == 0)
    assert scene.answer.inner_text() == kept
    expect(page.locator("#problem")).to_be_empty()


def test_escape_stops_too(open_page: Open) -> None:
    scene = open_page()
    page = scene.page
    scene.set_numbers(max_tokens=2000)
    scene.ask(LONG)
    wait_until(lambda: len(scene.answer.inner_text()) > 10)
    page.keyboard.press("Escape")
    scene.wait_for_end()


def test_an_answer_is_made_again_in_its_place(open_page: Open) -> None:
    scene = open_page()
    page = scene.page
    scene.ask(WHOLE.words)
    scene.wait_for_end()
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Retry this question").click()
    scene.wait_for_end()
    assert [m["role"] for m in body_of(sent)["messages"]] == ["user"]
    expect(page.locator(".message")).to_have_count(2)
    expect(scene.answer).to_have_text(WHOLE.answer)


def test_what_is_sent_is_the_whole_conversation_and_the_settings(open_page: Open) -> None:
    scene = open_page()
    page = scene.page
    scene.ask(WHOLE.words)
    scene.wait_for_end()
    page.fill("#system", "You are brief.")
    scene.set_numbers(top_p=0.5, seed=7, max_tokens=4)
    with page.expect_request("**/v1/chat/completions") as sent:
        scene.ask("And of Spain?")
    scene.wait_for_end()
    body = body_of(sent)
    assert body["messages"] == [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": WHOLE.words},
        {"role": "assistant", "content": WHOLE.answer},
        {"role": "user", "content": "And of Spain?"},
    ]
    chosen = {"temperature": 0, "top_p": 0.5, "seed": 7, "max_tokens": 4}
    assert {name: body[name] for name in chosen} == chosen
    assert "top_k" not in body, "an empty field is left to the service"


def test_a_new_chat_forgets_the_old_one(open_page: Open) -> None:
    scene = open_page()
    page = scene.page
    scene.ask(WHOLE.words)
    scene.wait_for_end()
    page.click("#clear")
    expect(page.locator(".message")).to_have_count(0)
    with page.expect_request("**/v1/chat/completions") as sent:
        scene.ask(WHOLE.words)
    assert len(body_of(sent)["messages"]) == 1
    scene.wait_for_end()


def test_what_is_refused_is_said_and_can_be_asked_again(open_page: Open) -> None:
    scene = open_page()
    page = scene.page
    scene.set_numbers(temperature=3)
    scene.ask(WHOLE.words)
    expect(page.locator("#problem")).to_contain_text("Temperature")
    expect(page.locator(".message.assistant")).to_have_count(0)
    scene.set_numbers(temperature=0)
    page.click("#again")
    expect(scene.answer).to_have_text(WHOLE.answer)
    scene.wait_for_end()
    expect(page.locator("#problem")).to_be_empty()


def test_a_model_without_images_is_offered_none(open_page: Open) -> None:
    expect(open_page().page.locator("#image-label")).to_be_hidden()


def test_the_key_is_asked_for_and_is_in_no_url(open_page: Open) -> None:
    scene = open_page(key=None)
    page = scene.page
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    enter(page, "sk-of-nobody")
    expect(page.locator("#door-problem")).to_have_text("This key is not known here.")
    enter(page, KEYS["alice"])
    expect(page.locator("#door")).to_be_hidden()
    expect(page.locator("#model")).to_have_value("smollm2")
    page.reload()
    expect(page.locator("#model")).to_have_value("smollm2")
    expect(page.locator("#door")).to_be_hidden()
    assert urls
    assert not [url for url in urls if "sk-of" in url]
    assert all(url.startswith(page.url) for url in urls), "it asks its own server only"


def test_it_works_by_keyboard_alone(open_page: Open) -> None:
    scene = open_page()
    page = scene.page
    page.focus("#words")
    page.keyboard.type(WHOLE.words)
    page.keyboard.press("Shift+Enter")
    expect(page.locator("#words")).to_have_value(f"{WHOLE.words}\n")
    page.keyboard.press("Enter")
    scene.wait_for_end()
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("() => document.activeElement.id"))
    assert {"again", "clear", "send", "model", "words", "system", "temperature", "log"} <= seen


CONTRAST = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (color) => {
    const [r, g, b] = rgba(color).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const color = getComputedStyle(element).backgroundColor;
      if (rgba(color)[3] === 255) return color;
    }
    return "white";
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const says = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!says || !element.checkVisibility() || element.closest(":disabled, option")) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${element.className || element.tagName}: ${ratio.toFixed(2)}`);
  }
  return found;
}"""
"""Texts that differ from what is behind them by less than WCAG's level AA wants."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_it_can_be_read_in_both_schemes_and_fits_a_phone(
    open_page: Open, scheme: Any, viewport: Any
) -> None:
    scene = open_page(color_scheme=scheme, viewport=viewport)
    page = scene.page
    scene.ask(WHOLE.words)
    scene.wait_for_end()
    assert page.evaluate(CONTRAST) == []
    width = page.evaluate("() => document.documentElement.scrollWidth")
    assert width <= viewport["width"], "nothing has to be scrolled sideways"
    paper = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(23, 22, 20)") == (scheme == "dark")


PICTURES = Path(__file__).parents[2] / "docs" / "images"
ALIKE = 0.7
"""The page differs from its picture by less than this share of what it differs by without its
style, in the same browser. How much that is depends on the browser and on its fonts."""


@pytest.mark.parametrize(
    ("name", "scheme", "viewport"),
    [("page-light", "light", DESK), ("page-dark", "dark", DESK), ("page-phone", "light", PHONE)],
)
def test_it_looks_as_in_the_documents(
    open_page: Open, name: str, scheme: Any, viewport: Any
) -> None:
    """`make screenshots` takes these pictures anew."""
    scene = open_page(color_scheme=scheme, viewport=viewport)
    scene.answered()
    shown = (PICTURES / f"{name}.png").read_bytes()
    styled = difference(scene.page.screenshot(), shown)
    scene.page.evaluate("() => [...document.styleSheets].forEach((s) => { s.disabled = true; })")
    bare = difference(scene.page.screenshot(), shown)
    assert styled < ALIKE * bare


def test_every_field_and_button_has_a_name(open_page: Open) -> None:
    nameless = open_page().page.evaluate("""() =>
      [...document.querySelectorAll("input, textarea, select")]
        .filter((field) => !field.labels.length && !field.ariaLabel).map((field) => field.id)""")
    assert nameless == []


def test_whoever_asked_for_no_motion_sees_none(open_page: Open) -> None:
    scene = open_page(reduced_motion="reduce")
    page = scene.page
    scene.ask(WHOLE.words)
    scene.wait_for_end()
    moving = "() => document.getAnimations().length"
    assert page.evaluate(moving) == 0


def test_the_page_is_served_without_a_key_and_its_data_is_not(service: Laptop) -> None:
    assert "Content-Security-Policy".lower() in httpx.get(service.url, timeout=PATIENCE_S).headers
    for path in (
        "/ui/api/about",
        "/ui/api/events",
        "/ui/api/answers/x",
        "/ui/nothing",
        "/v1/models",
    ):
        assert httpx.get(f"{service.url}{path}", timeout=PATIENCE_S).status_code == 401


# --- the pools, and what became of answers --------------------------------------------------

ENGINES = {"smollm2-prefill-0", *DECODING}


def test_both_pools_are_shown_and_blocks_as_they_cross(open_page: Open) -> None:
    scene = open_page()
    page = scene.page
    for engine in ENGINES:
        expect(scene.card(engine)).to_have_attribute("data-state", "ok")
        role = engine.split("-")[1]
        expect(page.locator(f"#{role}").locator(scene.card(engine))).to_have_count(1)
    assert page.locator("#crossed").inner_text() == "0"
    sent = int(scene.figure("smollm2-prefill-0", "sent"))
    scene.set_numbers(max_tokens=4)
    scene.ask("Some words that nobody has said before. " * 10)
    scene.wait_for_end()
    wait_until(lambda: int(page.locator("#crossed").inner_text()) > 0)
    wait_until(lambda: int(scene.figure("smollm2-prefill-0", "sent")) > sent)
    expect(page.locator("#crossed-bytes")).to_contain_text("B")


def test_rows_and_open_requests_are_shown_while_they_last(open_page: Open) -> None:
    scene = open_page()
    page = scene.page
    scene.set_numbers(max_tokens=2000)
    scene.ask(LONG)
    expect(page.locator("#pools-line")).to_have_text("1 open request")
    wait_until(lambda: sum(scene.rows().values()) == 1)
    page.click("#stop")
    expect(page.locator("#pools-line")).to_have_text("0 open requests")
    wait_until(lambda: sum(scene.rows().values()) == 0)


def test_an_answer_tells_where_it_was_computed_why_and_what_it_took(open_page: Open) -> None:
    scene = open_page()
    scene.set_numbers(max_tokens=8)
    scene.ask(f"{WHOLE.words} " * 3)
    scene.wait_for_end()
    facts = scene.facts
    expect(facts.locator(".prefill")).to_have_text("smollm2-prefill-0")
    decoder = facts.locator(".decode").inner_text()
    assert decoder in ENGINES
    for term in ("first token", "tokens/s", "tokens", "cached tokens", "ended"):
        expect(facts.locator("dt", has_text=term).first).to_be_visible()
    moved = facts.locator("dt", has_text="moved").locator("xpath=following-sibling::dd")
    expect(moved).to_have_text(re.compile(r"^[1-9]\d* blocks?, [\d.]+ [kM]B$"))
    facts.locator("summary", has_text="Why there").click()
    tables = facts.locator("table")
    expect(tables).to_have_count(2)
    expect(tables.last.locator("tbody tr")).to_have_count(2)
    chosen = tables.last.locator("tr.chosen")
    expect(chosen.locator("th")).to_have_text(f"✓ {decoder}")
    *terms, total = [float(cell) for cell in chosen.locator("td").all_inner_texts()[1:]]
    assert total == pytest.approx(sum(terms), abs=0.05 * (len(terms) + 1))


def test_a_picture_shows_when_an_answer_was_where(open_page: Open) -> None:
    scene = open_page()
    scene.ask(WHOLE.words)
    scene.wait_for_end()
    scene.show_timeline()
    told = scene.facts.locator("img").get_attribute("alt") or ""
    for word in ("smollm2-prefill-0: ", "tokens of the prompt", "first token", "router: stop"):
        assert word in told


def test_the_facts_of_an_answer_are_for_its_own_client(open_page: Open, service: Laptop) -> None:
    scene = open_page()
    page = scene.page
    with page.expect_response("**/v1/chat/completions") as response:
        scene.ask(WHOLE.words)
    scene.wait_for_end()
    url = f"{service.url}/ui/api/answers/{response.value.headers['x-request-id']}"
    found = {
        name: httpx.get(url, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE_S)
        for name, key in KEYS.items()
    }
    assert found["alice"].json()["requests"][0]["tenant"] == "alice"
    assert found["bob"].status_code == 404


def test_a_killed_engine_does_not_break_an_answer(open_page: Open) -> None:
    scene = open_page()
    victim, before = scene.killed()
    expect(scene.page.locator("#problem")).to_be_empty()
    after = scene.answer.inner_text()
    assert after.startswith(before)
    assert len(after) > len(before)
    (other,) = {*DECODING} - {victim}
    expect(scene.facts.locator(".way .decode")).to_have_text(other)
    expect(scene.card(victim)).to_have_attribute("data-state", "ok")
