"""Chromium, as the tests of the page and the script of its screenshots use it; and a service to
look at. On the import path of the tests (pytest's `pythonpath`)."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import yaml
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from waits import PATIENCE_S, wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
"""The program; None: it is not installed."""
WITHOUT_CHROMIUM = f"needs Chromium: none of {', '.join(NAMES)} is on the path"
VIEWPORT = {"width": 1280, "height": 720}
START_S = 3 * PATIENCE_S
"""Three engines start at once, and those that decode give way to everything else."""
OPTIONS = (
    "--no-sandbox",  # the tests may run as root
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
)


@contextlib.contextmanager
def chromium(*options: str) -> Iterator[Browser]:
    """A browser without a window, which ends with the block. `options`: further ones of its
    command line."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*OPTIONS, *options], timeout=PATIENCE_S * 1000
        )
        try:
            yield browser
        finally:
            browser.close()


class Pages:
    """The page of a service, opened in a browser again and again.

    What it complains about fails the test, except for answers of the server that a test provokes:
    `refusals` is in their words. A new page, with a process and a cache of its own, takes a second
    of a processor. So the page of one test is emptied for the next: it has kept nothing then.
    """

    def __init__(self, browser: Browser, url: str, refusals: str) -> None:
        self._browser, self._url, self._refusals = browser, url, refusals
        self._complaints: list[str] = []
        self._emptied: list[Page] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[Callable[..., Page]]:
        """Yield a function that opens a page, apart from the others, for a user of this kind:
        without another wish one that wants no motion, as drawing each frame takes a processor.
        `once`: the test leaves behind what cannot be undone."""
        opened: list[tuple[Page, bool]] = []

        def open_one(
            *,
            viewport: Any = VIEWPORT,
            color_scheme: Any = "light",
            reduced_motion: Any = "reduce",
            once: bool = False,
        ) -> Page:
            page = self._emptied.pop() if self._emptied else self._new()
            opened.append((page, once))
            page.set_viewport_size(viewport)
            page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
            page.goto(self._url)
            return page

        self._complaints.clear()
        yield open_one
        for page, once in opened:
            if once:
                page.context.close()
            else:
                self._empty(page)
        assert self._complaints == []

    def _new(self) -> Page:
        def note(said: Any) -> None:
            if said.type == "error" and self._refusals not in said.text:
                self._complaints.append(said.text)

        page = self._browser.new_context().new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("pageerror", lambda error: self._complaints.append(str(error)))
        page.on("console", note)
        return page

    def _empty(self, page: Page) -> None:
        """Forget what it has kept, on a file of the service, where nothing runs."""
        for other in page.context.pages:
            if other != page:
                other.close()
        page.goto(f"{self._url}/ui/page.css")
        page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
        self._emptied.append(page)


@dataclass(frozen=True)
class Laptop:
    """A service that `diptych up` runs."""

    url: str
    folder: Path

    def state(self) -> dict[str, Any]:
        """What `diptych status` reads."""
        for file in self.folder.glob("diptych-*/state.json"):
            return msgspec.json.decode(file.read_bytes(), type=dict)
        return {}


def shown_service(model: str) -> dict[str, Any]:
    """One prefill engine and two decode engines: one may be lost."""
    return {
        "apiVersion": "diptych.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "smollm2"},
        "spec": {"model": {"uri": model}, "prefill": {"replicas": 1}, "decode": {"replicas": 2}},
    }


@contextlib.contextmanager
def laptop(folder: Path, service: dict[str, Any], port: int, *options: str) -> Iterator[Laptop]:
    """`diptych up`, until the end of the block. `options`: further ones of its command line."""
    file = folder / "service.yaml"
    file.write_text(yaml.safe_dump(service))
    command = [sys.executable, "-m", "diptych.main", "up", str(file), *options]
    with served(command, folder, port) as running:
        yield running


@contextlib.contextmanager
def served(command: list[str], folder: Path, port: int) -> Iterator[Laptop]:
    """What this `diptych up` serves at a port, until the end of the block."""
    folder.chmod(0o700)
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or _is_ready(url), seconds=START_S)
        assert process.poll() is None, "diptych up has ended"
        yield Laptop(url, folder)
    finally:
        tree = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)
        psutil.wait_procs(tree, timeout=PATIENCE_S)


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
    return False


def difference(one: bytes, other: bytes) -> float:
    """How far two pictures (PNG) of one size differ: the mean over squares of 16 pixels, of 255
    shades of grey. What fonts do to letters is not seen."""
    small = []
    for content in (one, other):
        picture = Image.open(io.BytesIO(content)).convert("L")
        size = picture.width // 16, picture.height // 16
        small.append(np.asarray(picture.resize(size, Image.Resampling.BOX), dtype=np.float64))
    return float(np.abs(small[0] - small[1]).mean())
