"""What the tests start by a fork is as what `python -m` starts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import execnet
import msgspec
import psutil
import pytest
from chaos_kit.faulty_network import FaultyNetwork, why_no_networks
from fork_server import ForkServer
from waits import PATIENCE_S, wait_until

from diptych_protocol import EngineConfig

PYTHON = [sys.executable, "-P", "-m", "diptych_engine.serving.core_process"]
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


@pytest.mark.skipif(bool(why_no_networks()), reason=why_no_networks())
def test_it_starts_in_the_network_of_the_thread_that_asks() -> None:
    def start() -> tuple[str, subprocess.Popen[str]]:
        asked = subprocess.Popen([*PYTHON, "--help"], stdout=subprocess.PIPE, text=True)
        return os.readlink("/proc/thread-self/ns/net"), asked

    with FaultyNetwork(2, random.Random(1)) as network:
        for host in (1, 0):
            place, process = network.run(host, start)
            seen = psutil.Process(process.pid)
            assert "fork_server" in str(seen.cmdline())
            assert os.readlink(f"/proc/{process.pid}/ns/net") == place
            assert (place == os.readlink("/proc/self/ns/net")) == (host == 0)
            process.communicate(timeout=PATIENCE_S)


OF_A_WORKER = """
import os, psutil, subprocess, sys
program = [sys.executable, "-m", "diptych_engine.serving.core_process", "--help"]
said = subprocess.run(program, capture_output=True, text=True, check=True).stdout
channel.send(["fork_server" in str(psutil.Process().cmdline()), os.getppid(), said])
"""


def test_a_worker_of_pytest_is_one_and_starts_programs_as_tests_do() -> None:
    group = execnet.Group()
    gateway = group.makegateway("popen")
    assert gateway.remote_exec(OF_A_WORKER).receive() == [True, os.getpid(), run(["--help"])[1]]
    group.terminate(timeout=PATIENCE_S)


def test_where_the_server_ends_programs_start_as_usual(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server = ForkServer(imported=["no_such_module"])
    monkeypatch.setattr(subprocess, "_fork_exec", server.fork_exec)
    for _ in range(2):
        subprocess.run([sys.executable, "-m", "pytest", "--version"], check=True)
    server.close()
    assert "No module named 'no_such_module'" in capfd.readouterr().err
