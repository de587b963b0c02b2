"""Which model is served to a user who names none: the choice, and the network that is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from diptych.default_model import ENOUGH_MEMORY, Circumstances, choose, default_choice
from diptych.doctor import gather
from diptych.doctor.facts import Memory
from diptych.known_models import DEFAULT, KNOWN, PREFERRED

AT_HOME = Circumstances(ENOUGH_MEMORY, is_attended=True, network=True)


@pytest.mark.parametrize(
    ("other", "model", "why"),
    [
        ({}, PREFERRED, "639 MB are fetched once"),
        ({"network": False}, DEFAULT, "qwen3:0.6b (639 MB) cannot be fetched now"),
        ({"network": False, "preferred_is_here": True}, PREFERRED, "and is here"),
        ({"is_attended": False}, DEFAULT, "nobody is here to see qwen3:0.6b fetched (639 MB)"),
        ({"is_attended": False, "preferred_is_here": True}, PREFERRED, "and is here"),
        ({"available_memory": ENOUGH_MEMORY - 1}, DEFAULT, "wants 8 GiB of free memory"),
        ({"available_memory": 0, "preferred_is_here": True}, DEFAULT, "wants 8 GiB"),
        ({"in_ci": True, "preferred_is_here": True}, DEFAULT, "CI is set"),
    ],
)
def test_the_larger_model_is_served_where_it_surprises_nobody(
    other: dict[str, Any], model: str, why: str
) -> None:
    choice = choose(replace(AT_HOME, **other))
    assert choice.model.name == model
    assert why in choice.why
    rest = PREFERRED if model == DEFAULT else DEFAULT
    assert str(choice).startswith(f"serving {model}: ")
    assert str(choice).endswith(f"`diptych up {rest}` serves {rest}.")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a hub was asked for, which has the file; at a terminal with memory."""
    heard: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            heard.append(self.path)
            self.send_response(302)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(gather, "memory", lambda: Memory(2 * ENOUGH_MEMORY, ENOUGH_MEMORY))
    monkeypatch.delenv("CI", raising=False)
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        Thread(target=server.serve_forever, args=(0.01,)).start()
        yield heard
        server.shutdown()


def test_the_hub_is_asked_for_the_file_and_nothing_is_fetched(
    asked: list[str], tmp_path: Path
) -> None:
    assert default_choice(tmp_path).model.name == PREFERRED
    revision = KNOWN[PREFERRED].revision
    assert asked == [f"/Qwen/Qwen3-0.6B-GGUF/resolve/{revision}/Qwen3-0.6B-Q8_0.gguf"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("HF_HUB_OFFLINE", "1")])
def test_the_hub_is_not_asked_where_it_does_not_matter(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert default_choice(tmp_path).model.name == DEFAULT
    assert asked == []


def test_without_the_hub_the_small_model_is_served(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    choice = default_choice(tmp_path)
    assert (choice.model.name, asked) == (DEFAULT, [])
    assert "cannot be fetched now" in choice.why
