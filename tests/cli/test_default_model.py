"""Which model is served to a user who names none: the choice, and the network that is asked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, TextIO

import msgspec
import pytest
from cases import each

from diptych.default_model import ENOUGH_MEMORY, Circumstances, choose, default_choice
from diptych.doctor import gather
from diptych.doctor.facts import Memory
from diptych.errors import BadInputError
from diptych.known_models import DEFAULT, KNOWN, PREFERRED
from diptych.main import main

AT_HOME = Circumstances(ENOUGH_MEMORY, is_attended=True)


@each(
    ("other", "model", "why"),
    [
        ({}, PREFERRED, "639 MB are fetched once"),
        ({"obstacle": "no"}, DEFAULT, "qwen3:0.6b (639 MB) cannot be fetched now: no"),
        ({"obstacle": "no", "preferred_is_here": True}, PREFERRED, "and is here"),
        ({"is_attended": False}, DEFAULT, "a terminal alone gets qwen3:0.6b unasked"),
        (
            {"is_attended": False, "preferred_is_here": True},
            DEFAULT,
            "a terminal alone gets qwen3:0.6b unasked",
        ),
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
def terminal() -> Iterator[TextIO]:
    shown, end = os.openpty()
    with open(end, "w") as stream:
        yield stream
    os.close(shown)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, terminal: TextIO) -> Iterator[list[str]]:
    """What a hub was asked for, which has the file; at a terminal with memory."""
    heard: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            heard.append(self.path)
            self.send_response(404 if self.path.startswith("/mirror") else 302)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr(gather, "memory", lambda: Memory(2 * ENOUGH_MEMORY, ENOUGH_MEMORY))
    for name in ("CI", "HF_HUB_OFFLINE", "ALL_PROXY", "HTTP_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        Thread(target=server.serve_forever, args=(0.01,)).start()
        yield heard
        server.shutdown()


def test_the_hub_is_asked_for_the_file_and_nothing_is_fetched(
    asked: list[str], terminal: TextIO, tmp_path: Path
) -> None:
    assert default_choice(tmp_path, terminal).model.name == PREFERRED
    revision = KNOWN[PREFERRED].revision
    assert asked == [f"/Qwen/Qwen3-0.6B-GGUF/resolve/{revision}/Qwen3-0.6B-Q8_0.gguf"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("CI", "true", "CI is set"),
        ("HF_HUB_OFFLINE", "1", "fetched now: HF_HUB_OFFLINE is set"),
        ("HF_ENDPOINT", "http://127.0.0.1:1", "fetched now: [Errno 111] Connection refused"),
        ("ALL_PROXY", "socks5://127.0.0.1:1", "proxy or certificates: Using SOCKS proxy"),
        ("ALL_PROXY", "socks://me:mine@127.0.0.1:1", "proxy or certificates: Unknown scheme"),
        ("SSL_CERT_FILE", "/nowhere/ca.pem", "proxy or certificates: [Errno 2] No such file"),
    ],
)
def test_without_the_hub_the_small_model_is_served_and_the_reason_said(
    asked: list[str],
    terminal: TextIO,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    why: str,
) -> None:
    monkeypatch.setenv(name, value)
    choice = default_choice(tmp_path, terminal)
    assert (choice.model.name, asked) == (DEFAULT, [])
    assert why in choice.why
    assert "mine" not in choice.why


def test_a_hub_without_the_file_is_an_obstacle(
    asked: list[str], terminal: TextIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", os.environ["HF_ENDPOINT"] + "/mirror")
    assert default_choice(tmp_path, terminal).why.endswith("fetched now: the Hub answers 404")


def test_nothing_large_is_fetched_where_nobody_would_read_of_it(
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`diptych up > log` at a terminal. The empty folder of keys ends it before it serves."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(BadInputError):
        main(["up", "--api-keys", str(tmp_path)], standalone_mode=False)
    assert capsys.readouterr().out.startswith(f"serving {DEFAULT}: ")
    assert asked == []


def test_a_list_for_programs_says_what_is_served_at_the_terminal(
    asked: list[str],
    terminal: TextIO,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`diptych models --json | jq`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.stderr", terminal)
    main(["models", "--json"], standalone_mode=False)
    rows = msgspec.json.decode(capsys.readouterr().out)
    assert [row["name"] for row in rows if row["default"]] == [PREFERRED]
