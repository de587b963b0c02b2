"""Counts what the page does in a real browser while engines work. `python -m page_frames`
measures the frames themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser_kit import CHROMIUM, WITHOUT_CHROMIUM, chromium, watched_pages
from page_frames import counter
from page_kit import Echo, served_echo
from page_scenes import Scene
from playwright.sync_api import Browser, expect
from waits import wait_until

from diptych_router.telling.page.panels import (
    EngineFigures,
    HolderFigures,
    MoveFigures,
    Panels,
    panels_of,
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT_CHROMIUM)
BLOCKS = 2912
ENGINES = 12
SECONDS = 2.0
REFUSED = "Failed to load resource"
"""A browser says so of an answer that is an error, as it is where the router knows no request."""
LOOKS = 6
"""More than what the server takes in that time, with one at each end."""


def engine(number: int, step: int) -> EngineFigures:
    """One of several, busy with 32 requests, that has done a little more at each step."""
    holders = [HolderFigures(whose=f"{at:04x}", blocks=10 + step % 2) for at in range(8)]
    return EngineFigures(
        id=str(number),
        name=f"e-{number}",
        role="decode" if number else "prefill",
        state="ok",
        running=32,
        blocks_used=90 + step % 2,
        blocks_total=BLOCKS,
        block_tokens=16,
        blocks_received=10 * step,
        bytes_received=1000 * step,
        holders=holders,
        tokens_generated=100 * step,
    )


def pools(step: int, moves: int = 0) -> Panels:
    crossed = [
        MoveFigures(number=at, sender="e-0", receiver=f"e-{at}", whose="", blocks=16, bytes=1, ms=1)
        for at in range(1, moves + 1)
    ]
    return panels_of([engine(number, step) for number in range(ENGINES)], 32, 0, crossed)


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    with served_echo() as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def scene(echo: Echo, browser: Browser) -> Iterator[Scene]:
    echo.pools = pools(0)
    with watched_pages(browser, echo.url, REFUSED) as open_one:
        scene = Scene(open_one())
        expect(scene.page.locator(".engine")).to_have_count(ENGINES)
        yield scene


NOTE_MUTATIONS = """() => {
  window.touched = 0;
  const note = (all) => {
    for (const { addedNodes } of all) window.touched += Math.max(1, addedNodes.length);
  };
  new MutationObserver(note).observe(document.getElementById("pools"),
    { subtree: true, childList: true, characterData: true });
}"""


def test_what_did_not_change_on_a_card_is_not_touched(scene: Scene, echo: Echo) -> None:
    page = scene.page
    page.evaluate(NOTE_MUTATIONS)
    echo.pools = pools(1)
    expect(page.locator(".engine .brief").last).to_contain_text("91 of")
    page.evaluate("() => new Promise(requestAnimationFrame)")
    changed = 3 + 8  # the brief, received, in use; and each holder's button
    assert page.evaluate("() => window.touched") <= ENGINES * (changed + 3) + 4


COUNT_SQUARES = """() => {
  window.squares = 0;
  for (const name of ["fillRect", "strokeRect"]) {
    const draw = CanvasRenderingContext2D.prototype[name];
    CanvasRenderingContext2D.prototype[name] = function (...where) {
      window.squares += 1;
      return draw.apply(this, where);
    };
  }
}"""


def test_only_squares_that_look_different_are_drawn(scene: Scene, echo: Echo) -> None:
    page = scene.page
    page.evaluate(COUNT_SQUARES)
    echo.pools = pools(1)
    expect(page.locator(".engine .brief").last).to_contain_text("91 of")
    wait_until(lambda: page.evaluate("() => window.squares") > 0)
    used = 91
    assert page.evaluate("() => window.squares") <= ENGINES * used


def test_flights_cost_no_layout(scene: Scene, echo: Echo) -> None:
    echo.pools = pools(0, moves=4)
    expect(scene.page.locator("#traces li")).to_have_count(4)
    work = counter(scene.page)
    before = work()["LayoutCount"]
    scene.page.wait_for_timeout(1000 * SECONDS)
    assert work()["LayoutCount"] - before <= LOOKS


def test_an_answer_that_waits_costs_no_style_in_each_frame(scene: Scene, echo: Echo) -> None:
    echo.hold(True)
    scene.ask("one")
    expect(scene.page.locator(".message.answering")).to_have_count(1)
    work = counter(scene.page)
    before = work()["RecalcStyleCount"]
    scene.page.wait_for_timeout(1000 * SECONDS)
    styled = work()["RecalcStyleCount"] - before
    echo.hold(False)
    scene.wait_for_end()
    assert styled <= 40, "a style in each frame is 120"


GROW = """async (looks) => {
  const { Ribbon } = await import("/ui/ribbon.js");
  const ribbon = new Ribbon();
  document.getElementById("log").append(ribbon.element);
  const frame = () => new Promise(requestAnimationFrame);
  let elements = 0;
  for (let at = 1; at <= looks; at += 1) {
    const ticks_s = Array.from({ length: 1000 * at }, (_, tick) => tick / 1000);
    const bars = [{ kind: "decode", began_s: 0.5, ended_s: at, label: `at ${at}` }];
    const marks = [{ at_s: 0.5, label: "x", is_bad: false }];
    const timeline = { title: "t", seconds: at, lanes: [{ name: "e-1", bars, marks, ticks_s }] };
    ribbon.show({ whose: "", engine: "e-1", outcome: "", timeline });
    for (let frames = 0; frames < 12; frames += 1) await frame();
    elements = Math.max(elements, ribbon.element.querySelectorAll("*").length);
  }
  return elements;
}"""


def test_a_ribbon_that_grows_is_laid_out_once_a_look_and_stays_small(scene: Scene) -> None:
    work = counter(scene.page)
    before = work()["LayoutCount"]
    elements = scene.page.evaluate(GROW, 8)
    assert work()["LayoutCount"] - before <= 8 + LOOKS
    assert elements <= 250
