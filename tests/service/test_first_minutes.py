"""Somebody who never saw the project clones it, does what the README says, and sees an answer go on
after its engine was killed. The run is recorded: each step, and the seconds that it took."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser_kit import CHROMIUM, WITHOUT_CHROMIUM, chromium, served
from free_ports import free_port
from model_kit.questions import WHOLE
from page_scenes import Scene
from playwright.sync_api import expect

from diptych.known_models import DEFAULT

ROOT = Path(__file__).parents[2]
COMPILED = "kernels/diptych_kernels/native/__pycache__"
INSTALL_S = 1800
DECODING = ("smollm2-135m-decode-0", "smollm2-135m-decode-1")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(INSTALL_S + 600),
]


class Record:
    """What was done, and when. Times are told and not judged, because the machine makes them."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.lines: list[str] = []

    @contextlib.contextmanager
    def step(self, doing: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        now = time.monotonic()
        self.lines.append(f"{now - self._began:5.0f} s  (+{now - began:3.0f})  {doing}")


@pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT_CHROMIUM)
def test_from_a_clone_to_an_answer_that_outlives_its_engine(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    readme = (ROOT / "README.md").read_text()
    for told in ("```\nmake demo\n", "| `diptych up` |", "`http://127.0.0.1:8080/`"):
        assert told in readme, "the README tells somebody new to do something else"
    clone, run_folder, port, record = tmp_path / "clone", tmp_path / "run", free_port(), Record()
    run_folder.mkdir()
    with record.step("git clone"):
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True, timeout=INSTALL_S)
        # Kernels that are compiled here are not compiled again.
        (clone / COMPILED).mkdir()
        for kernel in (ROOT / COMPILED).glob("*.o"):
            shutil.copy(kernel, clone / COMPILED)
    with record.step("make demo: installed, and one question answered"):
        subprocess.run(["make", "demo"], cwd=clone, check=True, timeout=INSTALL_S)
    with contextlib.ExitStack() as open_things:
        with record.step("diptych up: ready"):
            # Named, because at a terminal `up` alone may serve another.
            command = [str(clone / ".venv" / "bin" / "diptych"), "up", DEFAULT]
            service = open_things.enter_context(served(command, run_folder, port))
        with record.step("the page is open, and shows the engines"):
            browser = open_things.enter_context(chromium())
            scene = open_things.enter_context(Scene.opened(browser, service.url, decoding=DECODING))
            for engine in DECODING:
                expect(scene.card(engine)).to_have_attribute("data-state", "ok")
        with record.step("a first answer"):
            scene.set_numbers(temperature=0)
            scene.ask(WHOLE.words)
            expect(scene.answer).to_have_text(WHOLE.answer)
            scene.wait_for_end()
        with record.step("an engine is killed, and its answer goes on to the end"):
            victim, before, _ = scene.killed()
            assert scene.answer.inner_text().startswith(before)
            assert len(scene.answer.inner_text()) > len(before)
        with record.step("the engine is there again"):
            expect(scene.card(victim)).to_have_attribute("data-state", "ok")
    record_property("first minutes", record.lines)
    print("", *record.lines, sep="\n")


def test_the_recorded_terminal_is_as_a_new_recording(tmp_path: Path) -> None:
    """The recording itself fails unless the engine was killed and came again."""
    new = tmp_path / "casts" / "kill.cast"
    command = [sys.executable, str(ROOT / "docs" / "cast.py"), str(new)]
    subprocess.run([*command, "--port", str(free_port())], check=True, timeout=600)
    for cast in (new, ROOT / "docs" / "casts" / "kill.cast"):
        header, *events = map(json.loads, cast.read_text().splitlines())
        assert (header["version"], {kind for _, kind, _ in events}) == (2, {"o"})
        times = [at for at, _, _ in events]
        assert times == sorted(times)
        shown = "".join(text for _, _, text in events)
        assert "kill -9" in shown
        assert "Once upon a time" in shown
        assert re.search(r"smollm2-decode-0: ready \(port \d+, restarts 1\)", shown)
