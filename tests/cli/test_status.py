"""What `diptych status` and `diptych up` say of a service that runs."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

from diptych.foreground import what_to_try
from diptych.laptop.rundir import PodState, RunDirectory, RunState, process_start_s, running
from diptych.status import read_cpus, read_health, show, with_facts
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_protocol import SchedulerStats

STATS = {
    "prefill/a-prefill-0": SchedulerStats(cpu_level="vnni"),
    "decode/a-decode-0": SchedulerStats(cpu_level="avx2", cpu_kernels_set_aside=2),
    "decode/a-decode-1": SchedulerStats(),
}


class Metrics(BaseHTTPRequestHandler):
    """A router's /metrics."""

    def do_GET(self) -> None:
        body, _ = ServerMetrics("a", lambda: STATS).exposition("")
        body += b'diptych:engine_silent{engine="decode/127.0.0.1:7000"} 1\n'
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def router() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Metrics)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def state(url: str) -> RunState:
    names = ["a-router-0", *(engine.rpartition("/")[2] for engine in STATS)]
    pods = [PodState(name, "role", "ready", 1, 0, {"http": 1}, "/logs/x") for name in names]
    return RunState("a", "a", url, True, 0.0, 1, 0.0, pods)


def test_engines_are_shown_with_their_level_and_what_is_set_aside(router: str) -> None:
    found = with_facts(state(router))
    assert [pod.cpu for pod in found.pods] == ["", "vnni", "avx2, 2 kernels set aside", ""]
    text = StringIO()
    show([found], Console(file=text, width=120))
    assert "avx2, 2 kernels set aside" in text.getvalue()


def test_pods_are_told_apart_however_narrow_it_is() -> None:
    names = [f"a-rather-long-name-of-a-service-{role}-0" for role in ("prefill", "decode")]
    pods = [PodState(name, "role", "ready", 1, 0, {"http": 1}, "/logs/x") for name in names]
    text = StringIO()
    show([RunState("a", "a", "http://h/v1", True, 0.0, 1, 0.0, pods)], Console(file=text, width=60))
    beginnings = "".join(line.partition(" ")[0] for line in text.getvalue().splitlines())
    assert all(name in beginnings for name in names), text.getvalue()


def test_engines_are_shown_with_how_the_router_judges_them() -> None:
    states = {"a": (0, "closed"), "b": (1, "open"), "c": (0, "open"), "d": (0, "half-open")}
    lines = [
        line
        for name, (silent, state) in states.items()
        for line in (
            f'diptych:engine_silent{{engine="decode/{name}"}} {silent}',
            f'diptych:engine_breaker_state{{engine="decode/{name}",state="{state}"}} 1',
        )
    ]
    for order in (lines, lines[::-1]):
        found = read_health("\n".join(order) + "\n")
        assert found == {"a": "ok", "b": "silent", "c": "failing", "d": "failing"}


def test_a_service_is_found_after_the_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel then says that it booted at another time."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with RunDirectory("svc") as directory:
        begun_s = process_start_s(os.getpid())
        directory.save(RunState("svc", "m", "http://h/v1", True, 0.0, os.getpid(), begun_s))
        booted = psutil.boot_time()
        for set_by in (-7200, 3, 86_400):
            monkeypatch.setattr("psutil._pslinux.boot_time", lambda at=booted + set_by: at)
            assert [each.service for each in running()] == ["svc"]
            with RunDirectory("next"):
                assert directory.path.exists()


def test_a_service_that_does_not_answer_is_shown_without() -> None:
    gone = state("http://127.0.0.1:1/v1")
    assert with_facts(gone) == gone


def test_what_is_no_exposition_is_an_error() -> None:
    with pytest.raises(ValueError, match="labels"):
        read_cpus("{ nonsense")


def test_what_to_try_is_one_command_whatever_the_model_is_called(tmp_path: Path) -> None:
    """Somebody else may have named it."""
    model = "it's '$(touch made)'"
    state = RunState("a", model, "http://127.0.0.1:8080/v1", True, 0.0, 1, 0.0)
    pasted = "\n".join(what_to_try(state)[1:-3])
    shell = ["bash", "-c", f'curl() {{ printf %s "${{@: -1}}"; }}\n{pasted}']
    said = subprocess.run(shell, cwd=tmp_path, check=True, capture_output=True).stdout
    assert msgspec.json.decode(said)["model"] == model
    assert list(tmp_path.iterdir()) == []
