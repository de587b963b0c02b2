"""What the tests start by a fork is as what `python -m` starts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from fork_server import LEASH
from free_ports import free_port
from waits import PATIENCE_S, wait_until

from diptych_protocol import EngineConfig, RouterConfig

PYTHON = [sys.executable, "-m", "diptych_engine.serving.core_process"]
OWN = ["--local", "ipc:///nowhere", "--parent-pid", str(os.getpid())]


def run(arguments: list[str], **options: Any) -> tuple[int, str, str]:
    ended = subprocess.run([*PYTHON, *arguments], capture_output=True, text=True, **options)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["--config", "{", *OWN], 2)])
def test_it_says_and_returns_the_same(arguments: list[str], code: int) -> None:
    forked = run(arguments)
    assert forked[0] == code
    # The server is not for programs with other variables than its own.
    assert forked == run(arguments, env={**os.environ, "UNUSUAL": "1"})


def test_it_is_a_child_where_and_as_it_was_asked_for(tmp_path: Path) -> None:
    config = msgspec.json.encode(EngineConfig(model="dummy://?num_hidden_layers=1")).decode()
    arguments = ["--config", config, "--local", f"ipc://{tmp_path}/core", *OWN[2:]]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*PYTHON, *arguments], cwd=tmp_path, stderr=log, start_new_session=True
        )
    seen = psutil.Process(process.pid)
    assert "fork_server" in str(seen.cmdline())
    wait_until(lambda: "ready" in (tmp_path / "log").read_text())
    assert (seen.ppid(), seen.cwd()) == (os.getpid(), str(tmp_path))
    assert os.getsid(process.pid) == process.pid
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def leashed(
    log: Path, module: str, *arguments: str, **variables: str
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A leash that holds a program, as `diptych up` starts it, and the supervisor's end of it."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    command = [*LEASH, "0", "python", "-m", module, *arguments]
    given = {**os.environ, "PATH": path, **variables}
    with theirs, log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=theirs.fileno(), stdout=output, stderr=output, env=given
        )
    return process, ours


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--config", 2)])
def test_a_pod_under_a_leash_says_and_returns_the_same(
    tmp_path: Path, argument: str, code: int
) -> None:
    said = []
    for name, variables in (("forked", {}), ("ordinary", {"UNUSUAL": "1"})):
        process, ours = leashed(tmp_path / name, PYTHON[2], argument, **variables)
        with ours:
            assert process.wait(PATIENCE_S) == code
        said.append((tmp_path / name).read_text())
    assert said[0] == said[1] != ""


def test_a_pod_ends_with_its_leash(tmp_path: Path, smollm2: str) -> None:
    (tmp_path / "router.json").write_bytes(msgspec.json.encode(RouterConfig(model=smollm2)))
    nobody = ("--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:1", "--port", str(free_port()))
    config = ("--config", str(tmp_path / "router.json"))
    process, ours = leashed(tmp_path / "log", "diptych_router", *config, *nobody)
    with ours:
        pod = psutil.Process(int(ours.recv(32)))
        wait_until(lambda: os.getsid(pod.pid) == pod.pid)
        assert "fork_server" in str(pod.cmdline())
    assert process.wait(PATIENCE_S) == 128 + signal.SIGKILL
    assert not pod.is_running()
