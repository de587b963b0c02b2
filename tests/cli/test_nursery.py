"""Pods of a nursery are as those that are started by a command."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from free_ports import free_port
from waits import PATIENCE_S, wait_until

from diptych.laptop.leash import TERMINATE
from diptych.laptop.nursery import Nursery, Start
from diptych_frontend.core_client.launcher import CORE
from diptych_protocol import EngineConfig, RouterConfig

ENGINE = "diptych_engine"


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    with closing(Nursery()) as started:
        yield started


def start(
    nursery: Nursery, log: Path, module: str, *arguments: str, **variables: str
) -> tuple[psutil.Process, socket.socket]:
    """A pod, and the supervisor's end of its leash."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(PATIENCE_S)
    with theirs, log.open("wb") as output:
        order = Start(("python", "-m", module, *arguments), 0, variables)
        nursery.start(order, theirs, output.fileno())
    return psutil.Process(int(ours.recv(32))), ours


def is_forked(process: psutil.Process, module: str) -> bool:
    """Whether it is shown as the module, and with a rest of the command line of its parent."""
    return ["-m", module] == process.cmdline()[1:3] and not process.cmdline()[-1]


def router(folder: Path, model: str) -> tuple[str, ...]:
    """The command of a router whose engines do not come."""
    (folder / "router.json").write_bytes(msgspec.json.encode(RouterConfig(model=model)))
    nobody = ("--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:1", "--port", str(free_port()))
    return ("diptych_router", "--config", str(folder / "router.json"), *nobody)


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--config", 2)])
@pytest.mark.parametrize("module", [ENGINE, "diptych_router"])
def test_a_pod_says_and_returns_the_same(
    nursery: Nursery, tmp_path: Path, module: str, argument: str, code: int
) -> None:
    said = []
    for name, variables in (("forked", {}), ("ordinary", {"UNUSUAL": "1"})):
        _, ours = start(nursery, tmp_path / name, module, argument, **variables)
        with ours:
            assert int(ours.recv(32)) == code
        said.append((tmp_path / name).read_text())
    assert said[0] == said[1] != ""


def test_nothing_is_imported_from_where_the_user_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose folder may have names that Python's own modules have, or be of somebody else."""
    mark = tmp_path / "imported"
    for name in ("msgspec", "queue"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write('{name} ')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNUSUAL", "1")  # so that it is no fork, which has imported all
    with closing(Nursery()) as nursery:
        for variables in ({}, {"UNUSUAL": "1"}):
            _, ours = start(nursery, tmp_path / "log", "diptych_router", "--help", **variables)
            with ours:
                assert int(ours.recv(32)) == 0, (tmp_path / "log").read_text()
    assert not mark.exists()


def test_a_pod_ends_with_its_supervisor(nursery: Nursery, tmp_path: Path, smollm2: str) -> None:
    pod, ours = start(nursery, tmp_path / "log", *router(tmp_path, smollm2))
    wait_until(lambda: os.getsid(pod.pid) == pod.pid)
    wait_until(lambda: is_forked(pod, "diptych_router"))
    ours.shutdown(socket.SHUT_WR)
    assert int(ours.recv(32)) == 128 + signal.SIGKILL
    assert not pod.is_running()
    ours.close()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=PATIENCE_S).is_success
    except httpx.HTTPError:
        return False


def test_an_engine_forks_its_core(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_bytes(
        msgspec.json.encode(EngineConfig(model="dummy://?num_hidden_layers=1"))
    )
    log, port = tmp_path / "log", free_port()
    config = ("--config", str(tmp_path / "engine.json"), "--port", str(port))
    pod, ours = start(nursery, log, ENGINE, *config)
    with ours:
        wait_until(lambda: "the engine can serve" in log.read_text())
        (core,) = pod.children()
        assert is_forked(core, CORE), core.cmdline()
        core.kill()
        assert int(ours.recv(32)) == 1  # the pod ends with its core
        assert "diptych engine: error: the" in log.read_text()
        wait_until(lambda: not core.is_running())
    pod, ours = start(nursery, log, ENGINE, *config)
    with ours:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"))
        (core,) = pod.children()
        ours.send(TERMINATE)
        assert int(ours.recv(32)) == 0
        assert not core.is_running()


def test_a_nursery_that_was_killed_is_replaced(
    nursery: Nursery, tmp_path: Path, smollm2: str
) -> None:
    before, first = start(nursery, tmp_path / "first", *router(tmp_path, smollm2))
    leash = before.parent()
    assert leash is not None
    forks_routers = leash.parent()
    assert forks_routers is not None
    forks_routers.kill()
    wait_until(lambda: forks_routers.status() == psutil.STATUS_ZOMBIE)
    _, second = start(nursery, tmp_path / "second", "diptych_router", "--help")
    with first, second:
        assert int(second.recv(32)) == 0
        assert before.is_running()
