"""What the page is made to show for its tests and pictures: what a user does, step by step.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from model_kit.questions import WHOLE
from playwright.sync_api import Browser, Locator, Page, expect
from waits import PATIENCE_S, wait_until

DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
LONG = "Write a long story about a lighthouse keeper and the sea."
DECODING = ("smollm2-decode-0", "smollm2-decode-1")
WATCH_THREAD = """() => {
  const stage = document.getElementById("stage");
  const led = [stage.dataset.thread];
  new MutationObserver(() => {
    if (stage.dataset.thread !== led.at(-1)) led.push(stage.dataset.thread);
  }).observe(stage, { attributes: true });
  return led;
}"""
"""Notes the engines that the thread of the answer leads to."""
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

    def answered(self) -> None:
        """One answer, with all that is told of it, and both pools idle again."""
        for engine in ("smollm2-prefill-0", *self.decoding):
            expect(self.card(engine)).to_have_attribute("data-state", "ok")
        self.set_numbers(temperature=0)
        self.ask(WHOLE.words)
        expect(self.answer).to_have_text(WHOLE.answer)
        self.wait_for_end()
        self.page.locator("#settings").evaluate("settings => { settings.open = false; }")
        self.facts.locator("summary", has_text="Why there").click()
        wait_until(lambda: sum(self.rows().values()) == 0)

    def show_timeline(self) -> None:
        """The timeline of the newest answer, in view."""
        self.facts.locator("summary", has_text="Timeline").click()
        self.facts.locator(".ribbon").scroll_into_view_if_needed()

    def killed(self) -> tuple[str, str, list[str]]:
        """The engine of a long answer is killed, the answer goes on, and is stopped then. Returns
        the name of that engine, the text that there was before, and which decode engines the thread
        led to, one after the other."""
        self.set_numbers(temperature=0, max_tokens=2000)
        self.ask(LONG)
        wait_until(lambda: len(self.answer.inner_text()) > 60)
        wait_until(lambda: sum(self.rows().values()) == 1)
        (victim,) = [name for name, rows in self.rows().items() if rows]
        threads = self.page.evaluate_handle(WATCH_THREAD)
        self.page.get_by_role("button", name=f"Kill {victim}").click()
        expect(self.card(victim)).not_to_have_attribute("data-state", "ok")
        before = self.answer.inner_text()
        wait_until(lambda: len(self.answer.inner_text()) > len(before) + 60)
        self.page.click("#stop")
        self.wait_for_end()
        self.page.locator("#settings").evaluate("settings => { settings.open = false; }")
        expect(self.facts.locator(".setback")).to_contain_text(victim)
        led = [name for name in threads.json_value() if name in self.decoding]
        return victim, before, led
