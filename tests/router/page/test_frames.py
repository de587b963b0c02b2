"""Counts what the page does in a real browser while engines work. `python -m page_frames`
measures the frames themselves."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import msgspec
import pytest
from browser_kit import CHROMIUM, WITHOUT_CHROMIUM, Pages, chromium
from page_frames import counter
from page_kit import Echo, served_echo
from page_scenes import Scene
from playwright.sync_api import expect
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
MOST_TRACES = 20
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


def pools(step: int, *moves: MoveFigures) -> Panels:
    return panels_of([engine(number, step) for number in range(ENGINES)], 32, 0, moves)


MOVES = itertools.count(1)
"""Through all tests: a page that opens may still be told of the last move of the test before."""


def move(sender: str = "e-0", receiver: str = "e-1") -> MoveFigures:
    """One that no page has seen."""
    return MoveFigures(
        number=next(MOVES), sender=sender, receiver=receiver, whose="", blocks=16, bytes=1, ms=1
    )


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    with served_echo() as served:
        yield served


@pytest.fixture(scope="module")
def pages(echo: Echo) -> Iterator[Pages]:
    with chromium() as browser:
        yield Pages(browser, echo.url, REFUSED)


@pytest.fixture
def scene(echo: Echo, pages: Pages) -> Iterator[Scene]:
    echo.pools = pools(0)
    with pages.watched() as open_one:
        scene = Scene(open_one(reduced_motion="no-preference"))
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
    spare = 6  # a busy machine draws twice; a list that is made anew would touch twice as many
    assert page.evaluate("() => window.touched") <= ENGINES * (changed + spare) + 4


def test_an_engine_that_takes_the_other_role_is_drawn_in_that_pool(
    scene: Scene, echo: Echo
) -> None:
    turned = msgspec.structs.replace(engine(1, 1), role="prefill", home="decode")
    echo.pools = panels_of([engine(0, 1), turned], 0, 0)
    card = scene.page.locator("#prefill .engine").last
    expect(card.locator(".name")).to_have_text("e-1")
    expect(card.locator(".state")).to_have_text("ok, from decode")
    echo.pools = panels_of([engine(0, 2), engine(1, 2)], 0, 0)
    expect(scene.page.locator("#decode .engine .state")).to_have_text("ok")


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
    echo.pools = pools(0, *(move(receiver=f"e-{at}") for at in range(1, 5)))
    expect(scene.page.locator("#traces li")).to_have_count(4)
    work = counter(scene.page)
    before = work()["LayoutCount"]
    scene.page.wait_for_timeout(1000 * SECONDS)
    assert work()["LayoutCount"] - before <= LOOKS


NOTE_FLIGHTS = """() => {
  window.flown = [];
  const draw = CanvasRenderingContext2D.prototype.fillRect;
  CanvasRenderingContext2D.prototype.fillRect = function (x, y, ...size) {
    if (this.canvas.id === "stage") window.flown.push(x + 5);
    return draw.call(this, x, y, ...size);
  };
}"""
EDGES = """() => ["prefill", "decode"].map((role) => {
  const { left, right } = document.getElementById(role).closest(".panel").getBoundingClientRect();
  return role === "prefill" ? right : left;
})"""
"""Between which lies everything that flies."""


@pytest.mark.parametrize(("sender", "receiver"), [("e-0", "e-1"), ("e-1", "e-0")])
def test_blocks_fly_from_their_sender_to_their_receiver(
    scene: Scene, echo: Echo, sender: str, receiver: str
) -> None:
    page = scene.page
    page.evaluate(NOTE_FLIGHTS)
    echo.pools = pools(0, move(sender, receiver))
    expect(page.locator("#traces li")).to_have_text([re.compile(f"{sender} → {receiver}")])
    wait_until(lambda: page.evaluate("() => window.flown.length") > 0)
    expect(page.locator("#stage")).to_have_attribute("data-drawn", "")
    flown, edges = page.evaluate("() => window.flown"), page.evaluate(EDGES)
    start, end = edges if sender == "e-0" else reversed(edges)
    assert min(edges) - 1 <= min(flown) <= max(flown) <= max(edges) + 1
    assert abs(flown[0] - start) < abs(flown[0] - end)
    assert abs(flown[-1] - end) < abs(flown[-1] - start)


def test_without_motion_blocks_are_told_and_do_not_fly(scene: Scene, echo: Echo) -> None:
    page = scene.page
    page.emulate_media(reduced_motion="reduce")
    page.evaluate(NOTE_FLIGHTS)
    echo.pools = pools(0, move())
    expect(page.locator("#traces li")).to_have_count(1)
    page.wait_for_timeout(200)
    assert page.evaluate("() => window.flown") == []


SLOW_FRAMES = """() => {
  window.slow = true;
  const burn = () => {
    const until = performance.now() + 60;
    while (window.slow && performance.now() < until);
    requestAnimationFrame(burn);
  };
  burn();
}"""


def test_flights_end_by_themselves_while_frames_are_slow_and_come_back(
    scene: Scene, echo: Echo
) -> None:
    page = scene.page
    page.evaluate(NOTE_FLIGHTS)
    page.evaluate(SLOW_FRAMES)
    told = itertools.count(1)

    def moved() -> int:
        """The squares that are drawn of a move, until none is left on the page."""
        echo.pools = pools(0, move())
        expect(page.locator("#traces li")).to_have_count(min(next(told), MOST_TRACES))
        expect(page.locator("#stage")).to_have_attribute("data-drawn", "")
        return int(page.evaluate("() => window.flown.splice(0).length"))

    assert moved() > 0
    assert moved() == 0, "so many frames were slow that it is told only"
    page.evaluate("() => { window.slow = false; }")
    wait_until(lambda: moved() > 0)


OVERLAPS = """() => [...document.querySelectorAll(".engine")]
  .filter((card) => [...card.children].some((part) => part.scrollHeight > part.clientHeight + 1
    && !part.matches(".legend") || part.getBoundingClientRect().bottom
    > card.getBoundingClientRect().bottom + 1))
  .map((card) => card.dataset.name)"""
"""Engines with a part that is cut, or lies over the next engine."""


def test_a_click_on_a_block_tells_whose_it_is(scene: Scene) -> None:
    card = scene.card("e-1")
    squares, told = card.locator(".squares"), card.locator(".told")
    squares.click(position={"x": 2, "y": 2})
    what = "10 blocks (160 tokens) hold the KV of a request that is computed here."
    expect(told).to_have_text(f"{what} Request 0000, of another client or chat.")
    expect(card.get_by_role("button", pressed=True)).to_have_text("10 in use, 0000")
    squares.hover(position={"x": 2, "y": 2})
    expect(squares).to_have_attribute("title", told.inner_text())
    last = squares.bounding_box()
    assert last is not None
    squares.click(position={"x": 2, "y": last["height"] - 2})
    expect(told).to_contain_text("hold nothing")
    assert scene.page.evaluate(OVERLAPS) == []


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
