"""What the page is made to show for its tests and pictures: what a user does, step by step.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from model_kit.questions import WHOLE
from playwright.sync_api import Browser, Locator, Page, expect
from waits import PATIENCE_S, wait_until

DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
LONG = "Write a long story about a lighthouse keeper and the sea."
DECODING = ("smollm2-decode-0", "smollm2-decode-1")
WATCH_THREAD = """() => {
  const stage = document.getElementById("stage");
  const led = (window.led = [stage.dataset.thread]);
  new MutationObserver(() => {
    if (stage.dataset.thread !== led.at(-1)) led.push(stage.dataset.thread);
  }).observe(stage, { attributes: true });
}"""
"""Notes the engines that the thread of the answer leads to."""
OTHERS = """async (count) => {
  const { Service } = await import("/ui/service.js");
  const service = new Service();
  window.others ??= new AbortController();
  for (let at = 0; at < count; at += 1) {
    const words = "Write a story about the sea and its ships. ".repeat(12);
    const content = `${performance.now()} ${at} ${words}`;
    const messages = [{ role: "user", content }];
    const body = { model: "smollm2", messages, stream: true, max_tokens: 300 };
    service.chat(body, `other-${performance.now()}-${at}`, window.others.signal).catch(() => {});
  }
}"""
"""Asks for so many answers more, which nobody reads."""
LOOK_MS = 1100
"""The router looks at the engines twice in this time."""
FLYING_MS = 300
"""After this long blocks that began to fly are on their way."""
expect.set_options(timeout=PATIENCE_S * 1000)


@dataclass
class Scene:
    """An open page of a service like that of `browser_kit.shown_service`."""

    page: Page
    decoding: tuple[str, ...] = DECODING
    """The names of the decode engines."""

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls,
        browser: Browser,
        url: str,
        scheme: Any = "light",
        viewport: Any = DESK,
        decoding: tuple[str, ...] = DECODING,
    ) -> Iterator[Scene]:
        """Open the page of a service without keys."""
        context = browser.new_context(viewport=viewport, color_scheme=scheme)
        try:
            page = context.new_page()
            page.goto(url)
            yield cls(page, decoding)
        finally:
            context.close()

    # --- what a user does ---------------------------------------------------------------------

    def set_numbers(self, **numbers: float) -> None:
        """Fill in fields of the settings."""
        self.page.locator("#settings").evaluate("settings => { settings.open = true; }")
        for name, value in numbers.items():
            self.page.fill(f"#{name}", str(value))

    def ask(self, words: str) -> None:
        expect(self.page.locator("#send")).to_be_enabled()
        self.page.fill("#words", words)
        self.page.press("#words", "Enter")

    def wait_for_end(self) -> None:
        """Until the answer is over, and its facts are there."""
        expect(self.page.locator("#stop")).to_be_disabled()
        expect(self.page.locator("#send")).to_be_enabled()

    # --- what it shows ------------------------------------------------------------------------

    @property
    def answer(self) -> Locator:
        """The text of the newest answer."""
        return self.page.locator(".message.assistant .text").last

    @property
    def written(self) -> str:
        """The newest answer as the model wrote it, with the marks that are drawn as something
        else."""
        return str(
            self.page.evaluate("""() => {
          const kept = localStorage.getItem(`diptych.chat.${sessionStorage["diptych.open-chat"]}`);
          return JSON.parse(kept).messages.at(-1).text;
        }""")
        )

    @property
    def facts(self) -> Locator:
        """What is told of the newest answer."""
        return self.page.locator(".facts").last

    def card(self, engine: str) -> Locator:
        return self.page.locator(f'.engine[data-name="{engine}"]')

    def figure(self, engine: str, term: str) -> str:
        """What the card of an engine says under a term."""
        of_card = self.card(engine).locator("dt", has_text=term)
        return str(of_card.locator("xpath=following-sibling::dd[1]").text_content())

    def number(self, engine: str, term: str) -> int:
        """The number with which that begins; 0 while nobody answers there."""
        first = self.figure(engine, term).split()[0].replace(",", "")
        return int(first) if first.isdecimal() else 0

    def rows(self) -> dict[str, int]:
        """Rows of the decode engines, as they are shown."""
        return {name: self.number(name, "rows") for name in self.decoding}

    def explained(self) -> dict[str, Any]:
        """What the router has recorded of the newest answer, asked as the page does."""
        found = self.page.evaluate("""async () => {
          const { Service } = await import("/ui/service.js");
          const title = document.querySelector("#ribbon .ribbon-title").textContent;
          return (await new Service().answer(title.split(":")[0])).requests[0];
        }""")
        return dict(found)

    # --- whole scenes -------------------------------------------------------------------------

    def ready(self) -> None:
        """Nothing is asked yet, and all engines answer."""
        for engine in ("smollm2-prefill-0", *self.decoding):
            expect(self.card(engine)).to_have_attribute("data-state", "ok")

    def come_to_rest(self) -> None:
        """Until nothing is computed, and all of it is told."""
        self.page.wait_for_timeout(LOOK_MS)
        expect(self.page.locator("#pools-line")).to_have_text("0 open requests")
        expect(self.page.locator("#stage")).to_have_attribute("data-drawn", "")
        wait_until(lambda: sum(self.rows().values()) == 0)

    def fold_settings(self) -> None:
        self.page.locator("#settings").evaluate("settings => { settings.open = false; }")

    def answered(self) -> None:
        """One answer, with all that is told of it, and both pools idle again."""
        self.ready()
        self.set_numbers(temperature=0)
        self.ask(WHOLE.words)
        expect(self.answer).to_have_text(WHOLE.answer)
        self.wait_for_end()
        self.fold_settings()
        self.facts.locator("summary", has_text="Why there").click()
        self.come_to_rest()

    def show_timeline(self) -> None:
        """The timeline of the newest answer, in view."""
        self.facts.locator("summary", has_text="Timeline").click()
        self.facts.locator(".ribbon").scroll_into_view_if_needed()

    def busy(self) -> None:
        """One answer among others, whose blocks fly."""
        self.ready()
        self.set_numbers(max_tokens=2000)
        self.page.evaluate(OTHERS, 6)
        self.ask(LONG)
        self.fold_settings()
        expect(self.page.locator("#ribbon .bar.decode")).to_have_count(1)
        wait_until(lambda: len(self.answer.inner_text()) > 200)
        told = self.page.locator("#traces li").count()
        self.page.evaluate(OTHERS, 4)
        wait_until(lambda: self.page.locator("#traces li").count() > told)
        self.page.wait_for_timeout(FLYING_MS)

    def compared(self) -> None:
        """The same prompt through one engine and through both pools."""
        self.ready()
        self.set_numbers(temperature=0)
        self.fold_settings()
        self.page.fill("#words", WHOLE.words)
        self.page.click("#compare-open")
        expect(self.page.locator("#verdict")).not_to_be_empty()

    def toured(self) -> None:
        """The third step of the tour, after an answer."""
        self.answered()
        self.tour()

    def tour(self) -> None:
        """Begin the tour, up to its third step."""
        self.page.click("#tour-open")
        for _ in range(2):
            self.page.click("#tour-next")

    def called(self) -> None:
        """A forced call of the calculator, its result, and the answer."""
        self.ready()
        self.set_numbers(temperature=0, max_tokens=60)
        self.page.select_option("#tool_choice", "required")
        for name in ("current_time", "ask_user"):
            self.page.uncheck(f"#{name}")
        self.ask("How much is 20 + 22?")
        self.fold_settings()
        expect(self.page.locator(".message.assistant")).to_have_count(2)
        self.wait_for_end()
        self.come_to_rest()
        self.page.locator(".message.user").evaluate("asked => asked.scrollIntoView()")

    def calm(self) -> None:
        """Nothing is computed any more, and all engines are there again."""
        self.page.evaluate("() => window.others?.abort()")
        if self.page.locator("#stop").is_enabled():
            self.page.click("#stop")
        self.ready()
        wait_until(lambda: sum(self.rows().values()) == 0)

    def lost(self) -> str:
        """The engine of a long answer was killed just now. Returns its name."""
        self.set_numbers(temperature=0, max_tokens=2000)
        self.ask(LONG)
        self.fold_settings()
        wait_until(lambda: len(self.answer.inner_text()) > 60)
        wait_until(lambda: sum(self.rows().values()) == 1)
        (victim,) = [name for name, rows in self.rows().items() if rows]
        self.page.evaluate(WATCH_THREAD)
        self.page.get_by_role("button", name=f"Kill {victim}").click()
        expect(self.card(victim)).not_to_have_attribute("data-state", "ok")
        return victim

    def killed(self) -> tuple[str, str, list[str]]:
        """The engine of a long answer is killed, the answer goes on, and is stopped then. Returns
        the name of that engine, the text that there was before, and which decode engines the thread
        led to, one after the other."""
        victim = self.lost()
        before = self.answer.inner_text()
        wait_until(lambda: len(self.answer.inner_text()) > len(before) + 60)
        self.page.click("#stop")
        self.wait_for_end()
        expect(self.facts.locator(".setback")).to_contain_text(victim)
        led = [name for name in self.page.evaluate("() => window.led") if name in self.decoding]
        return victim, before, led

    def killed_and_explained(self) -> None:
        """What is told of an answer whose engine was killed."""
        self.killed()
        self.show_timeline()


@dataclass(frozen=True)
class Picture:
    """A state of the page that the documents show."""

    show: Callable[[Scene], object]
    scheme: Any = "light"
    viewport: Any = field(default_factory=lambda: DESK)


PICTURES: Final[Mapping[str, Picture]] = {
    "page-first": Picture(Scene.ready),
    "page-light": Picture(Scene.answered),
    "page-dark": Picture(Scene.answered, scheme="dark"),
    "page-phone": Picture(Scene.answered, viewport=PHONE),
    "page-tools": Picture(Scene.called),
    "page-tour": Picture(Scene.toured, scheme="dark"),
    "page-compare": Picture(Scene.compared),
    "page-busy": Picture(Scene.busy),
    "page-lost": Picture(Scene.lost),
    "page-killed": Picture(Scene.killed_and_explained),
}
"""By the names of their files in docs/images."""
