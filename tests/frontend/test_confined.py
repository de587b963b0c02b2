"""What other people made is worked on in processes that end with their bounds, and when told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from waits import PATIENCE_S, wait_until

from diptych_frontend.confined.cancellation import (
    Cancellation,
    WorkCancelledError,
    cancelled_by,
)
from diptych_frontend.confined.child import WorkBounds
from diptych_frontend.confined.processes import ConfinedWork, WorkFailedError
from diptych_protocol import EngineOverloadedError

BOUNDS = WorkBounds(memory_bytes=64 << 20, seconds=2, message_bytes=1 << 20)
MODULE = f"""
import os, pathlib, sys, time
from diptych_frontend.confined.child import WorkBounds, serve

def work(head, body):
    match bytes(head):
        case b"echo":
            return b"pid %d" % os.getpid(), memoryview(body)
        case b"secret":
            return os.environ.get("DIPTYCH_SECRET", "none").encode(), memoryview(b"")
        case b"torch":
            return str("torch" in sys.modules).encode(), memoryview(b"")
        case b"take":
            bytes(512 << 20)
        case b"loop":
            pathlib.Path(bytes(body).decode()).write_text(str(os.getpid()))
            while True:
                pass
        case b"crash":
            os.abort()
        case b"vanish":
            os.kill(os.getpid(), 9)
        case b"flood":
            return b"", memoryview(bytes(2 << 20))

serve(work, {BOUNDS!r})
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConfinedWork:
    (tmp_path / "strange_work.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DIPTYCH_SECRET", "a key")
    return ConfinedWork("strange_work", BOUNDS)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def written(path: Path) -> int:
    wait_until(lambda: path.exists() and bool(path.read_text()), "the process tells who it is")
    return int(path.read_text())


def test_a_process_serves_one_piece_of_work_after_another(work: ConfinedWork) -> None:
    assert work.pids() == []  # none starts before there is work
    first, body = work.ask(b"echo", b"\0pixels")
    again, _ = work.ask(b"echo", b"")
    assert first == again
    assert body == b"\0pixels"
    assert first == b"pid %d" % work.pids()[0]
    assert work.ask(b"torch", b"")[0] == b"False"
    assert work.ask(b"secret", b"")[0] == b"none"  # keys of the environment stay with the owner


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (b"take", "more than 64 MiB of memory"),
        (b"loop", "more than 2 seconds"),
        (b"crash", "breaks down"),
        (b"flood", "breaks down"),
    ],
)
def test_work_beyond_its_bounds_ends_with_its_process(
    work: ConfinedWork, tmp_path: Path, what: bytes, why: str
) -> None:
    work.ask(b"echo", b"")
    (pid,) = work.pids()
    with pytest.raises(WorkFailedError, match=why):
        work.ask(what, str(tmp_path / "pid").encode())
    assert not alive(pid)
    assert work.pids() == []
    assert work.ask(b"echo", b"")[0] != b"pid %d" % pid


def test_a_process_that_the_system_ends_is_no_fault_of_the_content(work: ConfinedWork) -> None:
    with pytest.raises(EngineOverloadedError, match="retry later"):
        work.ask(b"vanish", b"")


def test_a_process_that_ended_while_it_was_idle_is_replaced(work: ConfinedWork) -> None:
    work.ask(b"echo", b"")
    (pid,) = work.pids()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the idle process leaves no zombie")
    assert work.ask(b"echo", b"x")[1] == b"x"


def test_who_cancels_ends_the_work_and_what_would_come_next(tmp_path: Path) -> None:
    (tmp_path / "strange_work.py").write_text(MODULE.replace("seconds=2", "seconds=600"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        work = ConfinedWork("strange_work", WorkBounds(64 << 20, 600, 1 << 20))
        cancellation, endings = Cancellation(), list[str]()

        def wanted() -> None:
            with cancelled_by(cancellation):
                for _ in range(2):
                    try:
                        work.ask(b"loop", str(tmp_path / "pid").encode())
                    except WorkCancelledError:
                        endings.append("cancelled")

        thread = threading.Thread(target=wanted)
        thread.start()
        pid = written(tmp_path / "pid")
        (tmp_path / "pid").unlink()
        cancellation.cancel()
        thread.join(PATIENCE_S)
        assert endings == ["cancelled", "cancelled"]
        assert not alive(pid)
        assert not (tmp_path / "pid").exists()  # the second piece of work was not begun
        assert work.ask(b"echo", b"x")[1] == b"x"


@pytest.mark.parametrize("what", ["echo", "loop"])
def test_a_process_ends_with_an_owner_that_is_killed(
    work: ConfinedWork, tmp_path: Path, what: str
) -> None:
    """An idle one and one that works for ever."""
    path = tmp_path / "pid"
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"""
import pathlib, signal
from diptych_frontend.confined.child import WorkBounds
from diptych_frontend.confined.processes import ConfinedWork
work = ConfinedWork("strange_work", {BOUNDS!r})
work.ask(b"{what}", {str(path).encode()!r})
pathlib.Path({str(path)!r}).write_text(str(work.pids()[0]))
signal.pause()
""",
        ]
    )
    try:
        pid = written(path)
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: not alive(pid), "the process ends with its owner")
