"""The owner's side of processes that work on what other people made."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from threading import BoundedSemaphore, Lock, Thread
from typing import Final

from diptych_frontend.confined.cancellation import WorkCancelledError, current_cancellation
from diptych_frontend.confined.child import OUT_OF_MEMORY, WorkBounds
from diptych_frontend.confined.frames import ConnectionEndedError, receive_frame, send_frame
from diptych_protocol import EngineOverloadedError

PROCESSES: Final = 2
"""At most so many do one kind of work. They start with the first work and end when idle."""
START_S: Final = 30.0
"""What a process may take to start on a busy machine, beside the time of its work."""
TURN_S: Final = 30.0
"""How long work waits for a process that is free."""
KILL_S: Final = 10.0
"""A process that has closed its connection ends within this time, or is killed."""
KEPT_VARIABLES: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


class WorkFailedError(Exception):
    """The content that was worked on is at fault; the message says what it took too much of."""


class ConfinedWork:
    """Work of one kind. Safe to use from several threads, each of which waits for its answer. Its
    processes end when nobody has this object any longer, and at the end of the program."""

    def __init__(self, module: str, bounds: WorkBounds) -> None:
        """module: `python -m` of it calls `serve` with the same bounds."""
        self._module = module
        self._bounds = bounds
        self._room = BoundedSemaphore(PROCESSES)
        self._lock = Lock()
        self._idle: list[_Process] = []
        weakref.finalize(self, _end_all, self._idle)

    def ask(self, head: bytes, body: bytes) -> tuple[bytearray, bytearray]:
        """What a process makes of this.

        Raises `WorkFailedError` if it took too much memory or time, or broke the process,
        `WorkCancelledError` if nobody waits for it any longer, and `EngineOverloadedError` if all
        processes are at work for too long, or the system ended this one.
        """
        if not self._room.acquire(timeout=TURN_S):
            raise EngineOverloadedError("too much is being prepared already; retry later")
        try:
            while True:
                process, used = self._take()
                try:
                    answer = process.ask(head, body, self._bounds)
                except _LeftError:
                    if used:
                        continue  # it was idle for so long that it has just ended
                    raise EngineOverloadedError("a process did not start; retry later") from None
                with self._lock:
                    self._idle.append(process)
                return answer
        finally:
            self._room.release()

    def pids(self) -> list[int]:
        """Which processes wait for work."""
        with self._lock:
            return [process.pid for process in self._idle]

    def _take(self) -> tuple[_Process, bool]:
        """A process, and whether it worked before."""
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_there():
                    return process, True
        return _Process(self._module), False


class _LeftError(Exception):
    """The process ended by itself, before it was asked."""


class _Process:
    """One process, started anew: it inherits nothing but its end of a pair of sockets."""

    def __init__(self, module: str) -> None:
        self._connection, inside = socket.socketpair()
        with inside:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=inside.fileno(),
                stdout=subprocess.DEVNULL,
                # Keys may be in the environment; what works on strangers' content has none.
                env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
                start_new_session=True,
            )
        self.pid = self._process.pid
        # One that ends when it was idle for long is not left behind as a zombie.
        Thread(target=self._process.wait, name="reaper", daemon=True).start()

    def is_there(self) -> bool:
        """Whether it still runs; what one that has ended held is given back."""
        if self._process.poll() is None:
            return True
        self._connection.close()
        return False

    def ask(self, head: bytes, body: bytes, bounds: WorkBounds) -> tuple[bytearray, bytearray]:
        """See `ConfinedWork.ask`. After an error the process is gone."""
        due = time.monotonic() + START_S + bounds.seconds
        cancellation = current_cancellation()
        try:
            with cancellation.ending_by(self._process.kill):
                send_frame(self._connection, head, body, due)
                return receive_frame(self._connection, bounds.message_bytes, due)
        except (ConnectionEndedError, TimeoutError) as exc:
            late = isinstance(exc, TimeoutError)
            status = self.end(kill=late)
            if cancellation.cancelled:
                raise WorkCancelledError from exc
            raise _failure(status, late, bounds) from exc
        except BaseException:
            self.end(kill=True)
            raise

    def end(self, *, kill: bool) -> int:
        """Close the connection and wait until the process has ended. Returns its exit status."""
        self._connection.close()
        if kill:
            self._process.kill()
        try:
            return self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _end_all(idle: list[_Process]) -> None:
    while idle:
        idle.pop().end(kill=True)


def _failure(status: int, late: bool, bounds: WorkBounds) -> Exception:
    """Why a process has ended with this exit status."""
    if late or status == -signal.SIGALRM:
        return WorkFailedError(f"it takes more than {bounds.seconds} seconds")
    if status == OUT_OF_MEMORY:
        return WorkFailedError(f"it takes more than {bounds.memory_bytes >> 20} MiB of memory")
    if status == 0:
        return _LeftError()
    if status == -signal.SIGKILL:
        return EngineOverloadedError("the system ended the process that prepared it; retry later")
    return WorkFailedError("whatever decodes it breaks down")
