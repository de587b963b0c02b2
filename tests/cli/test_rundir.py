"""Where the directories of runs are looked for, and which are removed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from itertools import permutations
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from waits import PATIENCE_S

from diptych.laptop import rundir
from diptych.laptop.rundir import (
    RunDirectory,
    RunState,
    process_start_s,
    remove_litter,
    running,
)

KILLED = """
import os, sys, msgspec
from diptych.laptop.rundir import RunDirectory, RunState
run = RunDirectory("killed")
run.save(msgspec.json.decode(sys.argv[1], type=RunState))
print(run.path, flush=True)
os._exit(0)
"""


def state_of(service: str, pid: int) -> RunState:
    created = process_start_s(os.getpid())
    return RunState(service, "m", "http://127.0.0.1:1/v1", True, time.time(), pid, created)


def test_a_service_is_found_whatever_session_started_it_and_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cron and sudo have no directory of a session, and su has another user's or one of its own."""
    sessions = tmp_path / "user"
    for folder in (sessions / "0", sessions / "1000", tmp_path / "tmp"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(rundir, "SESSIONS", sessions)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    def enter(session: Path | None) -> None:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        if session is not None:
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))

    service = f"of-{os.getpid()}"
    for begun, asking in permutations((None, sessions / "0", sessions / "1000"), 2):
        enter(begun)
        with RunDirectory(service) as run:
            run.save(state_of(service, os.getpid()))
            enter(asking)
            assert service in [each.service for each in running()]
        assert service not in [each.service for each in running()]
    enter(sessions / "0")
    with RunDirectory(service) as run:
        run.save(state_of(service, os.getpid()))
        enter(tmp_path / "tmp" / "..")  # a place that somebody has chosen
        assert running() == []


def test_a_run_whose_process_is_in_another_container_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id is nobody's here."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(PATIENCE_S)
    with RunDirectory("elsewhere") as run:
        run.save(state_of("elsewhere", gone.pid))
        remove_litter()
        assert run.path.exists()
        assert running() == []
    assert not run.path.exists()


def test_a_run_of_a_version_that_wrote_another_time_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    older = msgspec.to_builtins(state_of("older", os.getpid()))
    older["pid_created"] = time.time() + older.pop("pid_start_s")
    run = Path(tempfile.mkdtemp(prefix="diptych-older-", dir=tmp_path))
    (run / rundir.STATE_FILE).write_bytes(msgspec.json.encode(older))
    remove_litter()
    assert run.exists()
    assert running() == []


def test_what_a_killed_run_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    left = msgspec.json.encode(replace(state_of("killed", os.getpid()), pid_start_s=0.0))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, left.decode()],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    path = Path(done.stdout.strip())
    assert path.parent == tmp_path, done.stderr
    remove_litter()
    assert not path.exists()
