"""Records what the page of a service is answered, and what its user does, so that the site can play
it with the same files of the page (recording.js). A part of `make screenshots`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page_scenes import LONG, Scene
from playwright.sync_api import Browser, expect
from waits import wait_until

QUESTIONS = ("What is the name of the capital of France?", "What is it known for?")
TOKENS = 120
"""The longest answer; the last one is cut there, after it has moved to another engine."""
PAUSE_MS = 2500
"""Between an answer and the next question, to look at the pools."""
LEAD_MS = 1500
"""The recording begins so long before the first question."""
NOTING = """
const pageFetch = window.fetch;
window.run = { answers: [], deeds: [] };
window.fetch = async (asked, options = {}) => {
  const answer = await pageFetch(asked, options);
  const { status } = answer;
  const headers = {};
  for (const name of ["content-type", "x-request-id"]) {
    if (answer.headers.has(name)) headers[name] = answer.headers.get(name);
  }
  const method = options.method ?? "GET", url = String(asked);
  const noted = { at: performance.now(), method, url, status,
    headers, pieces: [], ended: false };
  window.run.answers.push(noted);
  if (!answer.body) return answer;
  const [shown, kept] = answer.body.tee();
  (async () => {
    const reader = kept.pipeThrough(new TextDecoderStream()).getReader();
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      noted.pieces.push([performance.now(), piece.value]);
    }
    noted.ended = true;
  })().catch(() => {});
  return new Response(shown, { status, headers });
};
"""
"""Notes every answer to a `fetch` of the page, with the times of its pieces."""
DEED = "deed => { window.run.deeds.push({ at: performance.now(), ...deed }); }"


def record(browser: Browser, url: str, file: Path) -> None:
    """Record two turns of a chat, and an answer whose engine is killed."""
    context = browser.new_context()
    context.add_init_script(NOTING)
    page = context.new_page()
    page.goto(url)
    scene = Scene(page)
    for engine in ("smollm2-prefill-0", *scene.decoding):
        expect(scene.card(engine)).to_have_attribute("data-state", "ok")
    scene.set_numbers(max_tokens=TOKENS)
    page.wait_for_timeout(LEAD_MS)
    for words in QUESTIONS:
        ask(scene, words)
        scene.wait_for_end()
        page.wait_for_timeout(PAUSE_MS)
    ask(scene, LONG)
    wait_until(lambda: len(scene.answer.inner_text()) > 60 and sum(scene.rows().values()) == 1)
    (victim,) = [name for name, rows in scene.rows().items() if rows]
    page.evaluate(DEED, {"kill": victim})
    page.get_by_role("button", name=f"Kill {victim}").click()
    scene.wait_for_end()
    expect(scene.facts.locator(".setback")).to_contain_text(victim)
    expect(scene.card(victim)).to_have_attribute("data-state", "ok")
    run = page.evaluate("window.run")
    context.close()
    file.write_text(json.dumps(from_the_first_deed(run), separators=(",", ":")) + "\n")


def ask(scene: Scene, words: str) -> None:
    scene.page.evaluate(DEED, {"ask": words})
    scene.ask(words)


def from_the_first_deed(run: dict[str, Any]) -> dict[str, Any]:
    """Count times from a moment before the first question; what was there then is there at 0. The
    token of this run, which kills engines, means nothing any more and is left out."""
    zero: float = run["deeds"][0]["at"] - LEAD_MS

    def counted(at: float) -> int:
        return max(0, round(at - zero))

    for deed in run["deeds"]:
        deed["at"] = counted(deed["at"])
    for answer in run["answers"]:
        answer["at"] = counted(answer["at"])
        answer["pieces"] = [[counted(at), text] for at, text in answer["pieces"]]
        if answer["url"] == "/ui/api/about":
            about = json.loads("".join(text for _, text in answer["pieces"]))
            about["control"]["token"] = "of a run that is over"
            answer["pieces"] = [[0, json.dumps(about)]]
    return run
