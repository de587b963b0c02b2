"""What other people made is worked on in processes that end with their bounds, and when told to."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waits import PATIENCE_S, wait_until

from diptych_frontend.confined.cancellation import (
    Cancellation,
    NotAtOnceError,
    WorkCancelledError,
    cancelled_by,
    in_haste,
)
from diptych_frontend.confined.processes import (
    AT_ONCE_BYTES,
    LENGTHS,
    ConfinedWork,
    WorkBounds,
    WorkFailedError,
    send_frame,
)
from diptych_protocol import EngineOverloadedError

BOUNDS = WorkBounds(memory_bytes=64 << 20, seconds=2, message_bytes=1 << 20, idle_seconds=60)
MODULE = """
import os, pathlib, sys, time
from diptych_frontend.confined.processes import serve

def work(head, body):
    match bytes(head):
        case b"echo":
            return b"pid %d" % os.getpid(), memoryview(body)
        case b"secret":
            return os.environ.get("DIPTYCH_SECRET", "none").encode(), memoryview(b"")
        case b"zone":
            return time.tzname[0].encode(), memoryview(b"")
        case b"torch":
            return str("torch" in sys.modules).encode(), memoryview(b"")
        case b"take":
            bytes(512 << 20)
        case b"loop":
            pathlib.Path(bytes(body).decode()).write_text(str(os.getpid()))
            while True:
                pass
        case b"until":
            while not pathlib.Path(bytes(body).decode()).exists():
                time.sleep(0.001)
            return b"late", memoryview(b"")
        case b"large":
            return b"", memoryview(bytes(70_000))
        case b"crash":
            os.abort()
        case b"vanish":
            os.kill(os.getpid(), 9)
        case b"flood":
            return b"", memoryview(bytes(2 << 20))

serve(work)
"""
FOR_LONG = dataclasses.replace(BOUNDS, seconds=600)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "strange_work.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DIPTYCH_SECRET", "a key")
    monkeypatch.setenv("TZ", "HERE-3")
    return "strange_work"


@pytest.fixture
def work(module: str) -> ConfinedWork:
    return ConfinedWork(module, BOUNDS)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may end while it is read
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
    assert work.ask(b"zone", b"")[0] == b"HERE"  # templates tell the time
    assert work.ask(b"secret", b"")[0] == b"none"  # keys of the environment stay with the owner


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (b"take", "more than 64 MiB of memory"),
        (b"loop", "more than 2 seconds"),
        (b"crash", "breaks down"),
        (b"flood", "what it makes has more than 1 MiB"),
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


def test_who_cancels_ends_the_work_and_what_would_come_next(module: str, tmp_path: Path) -> None:
    work = ConfinedWork(module, FOR_LONG)
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


def at_once(work: ConfinedWork, head: bytes, body: bytes = b"") -> bytes | None:
    """What who is in haste gets; None if that is nothing."""
    token = in_haste.set(True)
    try:
        return bytes(work.ask(head, body)[0])
    except NotAtOnceError:
        return None
    finally:
        in_haste.reset(token)


def test_who_is_in_haste_waits_for_nothing_that_is_late(module: str, tmp_path: Path) -> None:
    work = ConfinedWork(module, FOR_LONG)
    assert at_once(work, b"echo") is None  # no process starts for it
    assert work.pids() == []
    work.start()
    (pid,) = work.pids()
    first = bytes(work.ask(b"echo", b"")[0])
    assert first == b"pid %d" % pid
    wait_until(lambda: at_once(work, b"echo") == first, "it gets an answer in time")
    end = tmp_path / "end"
    assert at_once(work, b"until", str(end).encode()) is None
    assert work.pids() == []
    second = bytes(work.ask(b"echo", b"")[0])  # who may wait has a process of its own
    assert second != first
    assert at_once(work, b"echo") is None  # and one late answer at a time is enough
    end.touch()
    wait_until(lambda: at_once(work, b"echo") in (first, second), "the late answer is dropped")
    assert pid in work.pids()


def test_a_small_message_is_sent_whole() -> None:
    """A second half may come after a hurried caller has given its process up."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        send_frame(ours, b"head", memoryview(b"body"), time.monotonic() + PATIENCE_S)
        assert theirs.recv(64)[LENGTHS.size :] == b"headbody"


@pytest.mark.parametrize("what", [b"crash", b"take", b"large"])
def test_what_fails_or_is_large_is_nothing_for_who_is_in_haste(
    work: ConfinedWork, what: bytes
) -> None:
    work.ask(b"echo", b"")
    (pid,) = work.pids()
    assert at_once(work, what) is None
    wait_until(lambda: at_once(work, b"echo") is None and not alive(pid), "the process is gone")
    assert work.ask(b"echo", b"x")[1] == b"x"
    assert at_once(work, b"echo", bytes(AT_ONCE_BYTES)) is None


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
from diptych_frontend.confined.processes import WorkBounds
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


def test_a_forked_program_has_processes_of_its_own(module: str) -> None:
    script = f"""
import os, sys
from diptych_frontend.confined.processes import WorkBounds
from diptych_frontend.confined.processes import ConfinedWork

work = ConfinedWork({module!r}, WorkBounds({BOUNDS.memory_bytes}, 60, {BOUNDS.message_bytes}, 60))
first, _ = work.ask(b"echo", b"")
with work._lock:  # as another thread may
    child = os.fork()
if child == 0:
    sys.exit(work.ask(b"echo", b"")[0] == first)
_, status = os.waitpid(child, 0)
sys.exit(status or work.ask(b"echo", b"")[0] != first)
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=PATIENCE_S)
    assert ended.returncode == 0
