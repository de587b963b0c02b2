"""`diptych top`: the engines of a service on this machine, from what its router exports."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from diptych.laptop.rundir import RunDirectory, RunState, process_start_s
from diptych.main import main
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_protocol import SchedulerStats

FEWEST_TOKENS = 1000


class Metrics(BaseHTTPRequestHandler):
    """A router's /metrics, whose decode engine has generated more tokens at each look."""

    looks = 0

    def do_GET(self) -> None:
        Metrics.looks += 1
        generated = FEWEST_TOKENS * Metrics.looks
        stats = {
            "decode/a-decode-0": SchedulerStats(num_running=2, tokens_generated=generated),
            "prefill/a-prefill-0": SchedulerStats(
                blocks_total=40, blocks_free=40, blocks_pinned=12
            ),
        }
        body, _ = ServerMetrics("a", lambda: stats).exposition("")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body if self.path == "/metrics" else b"{ nonsense")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def router() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Metrics)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def no_other_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def run(url: str, *arguments: str) -> Any:
    """The command beside a service that this process seems to run."""
    own = os.getpid()
    with RunDirectory("a") as directory:
        directory.save(RunState("a", "a", url, True, 0.0, own, process_start_s(own)))
        return CliRunner().invoke(main, ["top", *arguments])


def test_engines_are_listed_by_pool_with_what_went_on_during_the_interval(router: str) -> None:
    result = run(f"{router}/v1", "--interval", "0.5")
    assert result.exit_code == 0, result.output
    heading, prefill, decode = result.stdout.splitlines()
    assert heading.startswith("ENGINE")
    assert prefill.split() == ["a-prefill-0", "prefill", "0", "0", "0", "0%", "30%", "0", "0.0"]
    assert decode.split()[:3] == ["a-decode-0", "decode", "2"]
    assert float(decode.split()[-1]) > 0


def test_programs_get_a_list(router: str) -> None:
    result = run(f"{router}/v1", "a", "--interval", "0.5", "--json")
    engines = msgspec.json.decode(result.stdout)
    assert [(each["name"], each["running"]) for each in engines] == [
        ("a-prefill-0", 0),
        ("a-decode-0", 2),
    ]


@pytest.mark.parametrize(
    ("path", "arguments", "said"),
    [
        ("/v1", ["b"], "no service b runs here, only a"),
        ("/other/v1", [], "the metrics of a cannot be read"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(
    router: str, path: str, arguments: list[str], said: str
) -> None:
    result = run(router + path, *arguments)
    assert (result.exit_code, said in result.stderr) == (1, True), result.output


def test_a_router_that_is_gone_is_named() -> None:
    result = run("http://127.0.0.1:1/v1")
    assert result.exit_code == 1
    assert "the router of a does not answer" in result.stderr


def test_without_a_service_it_says_how_to_start_one() -> None:
    result = CliRunner().invoke(main, ["top"])
    assert result.exit_code == 1
    assert "start one with `diptych up`" in result.stderr
