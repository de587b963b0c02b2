"""Processes that work on untrusted content: the messages, the inside, and the owner's side.

A message has a head in msgpack and a body of raw bytes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from threading import BoundedSemaphore, Lock, Thread
from typing import Final

from diptych_frontend.confined.cancellation import (
    NotAtOnceError,
    WorkCancelledError,
    current_cancellation,
    in_haste,
)
from diptych_protocol import EngineOverloadedError

# --- messages ---------------------------------------------------------------------------------

LENGTHS: Final = struct.Struct("<II")


class ConnectionEndedError(Exception):
    """The other end is gone."""


def send_frame(
    connection: socket.socket, head: bytes, body: bytes | memoryview, due: float
) -> None:
    """Send a message. Raises `ConnectionEndedError`, and `TimeoutError` after `due` (monotonic)."""
    parts: tuple[bytes | memoryview, ...] = (LENGTHS.pack(len(head), len(body)) + head, body)
    if len(body) <= AT_ONCE_BYTES:
        parts = (b"".join(parts),)  # in halves it would cost a process whose caller is in haste
    try:
        for part in parts:
            connection.settimeout(_left(due))
            connection.sendall(part)
    except TimeoutError:
        raise
    except OSError as exc:
        raise ConnectionEndedError from exc


def receive_frame(
    connection: socket.socket, max_bytes: int, due: float, begun: bytes = b""
) -> tuple[bytearray, bytearray]:
    """Receive head and body. begun: what has come of them.

    Raises as `send_frame`, and `ConnectionEndedError` for a message of more than `max_bytes`.
    """
    received = bytearray(begun)
    while len(received) < LENGTHS.size:
        received += some_of(connection, _left(due))
    head_bytes, body_bytes = LENGTHS.unpack_from(received)
    if head_bytes + body_bytes > max_bytes:
        raise ConnectionEndedError(f"a message of {head_bytes + body_bytes} bytes")
    body_at = LENGTHS.size + head_bytes
    while len(received) < body_at + body_bytes:
        received += some_of(connection, _left(due))
    head = received[LENGTHS.size : body_at]
    del received[:body_at]
    if len(received) > body_bytes:
        raise ConnectionEndedError("more than one message")
    return head, received


def some_of(connection: socket.socket, seconds: float) -> bytes:
    """Return what is there of a message, as soon as there is something: all of a small one, since
    the next one is sent only after the answer. Raises as `send_frame`."""
    connection.settimeout(seconds)
    try:
        some = connection.recv(AT_ONCE_BYTES)
    except (BlockingIOError, TimeoutError):
        raise TimeoutError from None
    except OSError as exc:
        raise ConnectionEndedError from exc
    if not some:
        raise ConnectionEndedError
    return some


def _left(due: float) -> float:
    left = due - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


# --- inside a process -------------------------------------------------------------------------

OUT_OF_MEMORY: Final = 77
"""Exit status of a process whose work exceeded its memory."""
ANSWER_TOO_LARGE: Final = 78
"""Exit status of a process whose answer exceeded the size of a message."""


@dataclass(frozen=True, slots=True)
class WorkBounds:
    """The limits of one piece of work."""

    memory_bytes: int
    """Address space beyond what the process uses when it begins to serve."""
    seconds: int
    message_bytes: int
    """The most bytes of a question, and of an answer."""
    idle_seconds: int
    """A process without a question for this long ends."""

    def as_argument(self) -> str:
        """The limits as the process's only argument."""
        return json.dumps(asdict(self))


def serve(work: Callable[[bytearray, bytearray], tuple[bytes, memoryview]]) -> None:
    """Answer questions over standard input, a socket, until its other end is closed.

    A piece of work that exceeds its limits ends the process. Its owner learns the cause from the
    exit status, and starts another process. The time limit is enforced here as well as by the
    owner, so that a process whose owner was killed ends too.
    """
    bounds = WorkBounds(**json.loads(sys.argv[1]))
    connection = socket.socket(fileno=os.dup(0))
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    limit = used + bounds.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            idle_until = time.monotonic() + bounds.idle_seconds
            asked = receive_frame(connection, bounds.message_bytes, idle_until)
        except (ConnectionEndedError, TimeoutError):
            return
        signal.alarm(bounds.seconds)  # its default action ends a process that is in C code, too
        try:
            head, body = work(*asked)
            if len(head) + len(body) > bounds.message_bytes:
                os._exit(ANSWER_TOO_LARGE)
            send_frame(connection, head, body, time.monotonic() + bounds.seconds)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except (ConnectionEndedError, TimeoutError):
            raise SystemExit(1) from None
        signal.alarm(0)


# --- the owner's side -------------------------------------------------------------------------

PROCESSES: Final = 2
"""The most processes for one kind of work, beside one whose hurried answer is late. They start with
the first work and end when idle."""
START_S: Final = 30.0
"""How long a process may take to start on a busy machine, in addition to its work."""
TURN_S: Final = 30.0
"""How long work waits for a free process."""
AT_ONCE_S: Final = 0.005
"""How long a hurried caller waits for an answer."""
AT_ONCE_BYTES: Final = 64 << 10
"""A larger question might not fit into the socket, and a larger answer is much work for its reader.
Neither is for hurried callers."""
KILL_S: Final = 10.0
"""A process that has closed its connection is killed unless it ends within this time."""
KEPT_VARIABLES: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")


class WorkFailedError(Exception):
    """The content was at fault; the message says which limit it exceeded."""


class ConfinedWork:
    """Work of one kind. Safe to use from several threads, each of which waits for its answer. The
    processes end when this object is garbage-collected, and at the end of the program."""

    def __init__(self, module: str, bounds: WorkBounds) -> None:
        """module: `python -m` of it calls `serve`."""
        self._module = module
        self._bounds = bounds
        self._room = BoundedSemaphore(PROCESSES)
        self._lock = Lock()
        self._idle: list[_Process] = []
        self._late: list[_Process] = []
        """Asked in haste, and has not answered in time: one at most."""
        weakref.finalize(self, _end_all, self._idle, self._late)
        _of_this_program.add(self)

    def begin_after_fork(self) -> None:
        """Reset this object in a forked process: the processes belong to its parent, and so do its
        threads, one of which may have held a lock."""
        self._room, self._lock = BoundedSemaphore(PROCESSES), Lock()
        for some in (self._idle, self._late):
            while some:
                some.pop().leave_to_parent()

    def start(self) -> None:
        """Start a process before there is work, so that the first work need not wait for it."""
        with self._lock:
            if not self._idle:
                self._idle.append(_Process(self._module, self._bounds))

    def ask(self, head: bytes, body: bytes) -> tuple[bytearray, bytearray]:
        """Return a process's answer.

        Raises `WorkFailedError` if the work took too much memory or time, or broke the process,
        `WorkCancelledError` if nobody waits for it any longer, and `EngineOverloadedError` if all
        processes are busy for too long, or the system ended this one. A hurried caller gets a quick
        answer or `NotAtOnceError`.
        """
        if in_haste.get():
            return self._ask_in_haste(head, body)
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
        """The ids of the processes that wait for work."""
        with self._lock:
            return [process.pid for process in self._idle]

    def _ask_in_haste(self, head: bytes, body: bytes) -> tuple[bytearray, bytearray]:
        """Asks a process that waits for work. If its answer is late, it is not asked again before
        that has come, and until then nobody else in haste waits for anything."""
        with self._lock:
            if self._late:
                self._reclaim()
            if self._late or not self._idle or len(head) + len(body) > AT_ONCE_BYTES:
                raise NotAtOnceError
            process = self._idle.pop()
            try:
                answer = process.ask_in_haste(head, body)
            except _LeftError:
                raise NotAtOnceError from None  # who may wait for longer learns why
            if answer is None:
                self._late.append(process)
                raise NotAtOnceError
            self._idle.append(process)
            return answer

    def _reclaim(self) -> None:
        """Drop an answer that was late. The lock is held."""
        for process in [*self._late]:
            try:
                if process.answer_within(0) is None:
                    continue
                self._idle.append(process)
            except _LeftError:
                pass
            self._late.remove(process)

    def _take(self) -> tuple[_Process, bool]:
        """A process, and whether it worked before."""
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_there():
                    return process, True
        return _Process(self._module, self._bounds), False


class _LeftError(Exception):
    """The process has ended: by itself before it was asked, or because nobody waits for it."""


class _Process:
    """One process, started anew: it inherits nothing but its end of a pair of sockets."""

    def __init__(self, module: str, bounds: WorkBounds) -> None:
        self._connection, inside = socket.socketpair()
        with inside:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, bounds.as_argument()],
                stdin=inside.fileno(),
                stdout=subprocess.DEVNULL,
                # Keys may be in the environment; what works on strangers' content has none.
                env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
                start_new_session=True,
            )
        self.pid = self._process.pid
        # One that ends when it was idle for long is not left behind as a zombie.
        Thread(target=self._process.wait, name="reaper", daemon=True).start()

    def leave_to_parent(self) -> None:
        """In a forked process: have no part in it any more."""
        self._connection.close()
        self._process.returncode = 0  # nobody here waits for it

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

    def ask_in_haste(self, head: bytes, body: bytes) -> tuple[bytearray, bytearray] | None:
        """The answer, if it comes at once. Raises `_LeftError` if the process is gone."""
        try:
            send_frame(self._connection, head, body, time.monotonic() + AT_ONCE_S)
        except (ConnectionEndedError, TimeoutError):
            raise self._left() from None
        return self.answer_within(AT_ONCE_S)

    def answer_within(self, seconds: float) -> tuple[bytearray, bytearray] | None:
        """As `ask_in_haste`. A process whose answer is large, or comes by halves, is ended."""
        try:
            try:
                begun = some_of(self._connection, seconds)
            except TimeoutError:
                return None
            due = time.monotonic() + AT_ONCE_S
            return receive_frame(self._connection, AT_ONCE_BYTES, due, begun)
        except (ConnectionEndedError, TimeoutError):
            raise self._left() from None

    def _left(self) -> _LeftError:
        """Leave the process to itself, without waiting for its end."""
        self._process.kill()
        self._connection.close()
        return _LeftError()

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


_of_this_program: Final[weakref.WeakSet[ConfinedWork]] = weakref.WeakSet()


def _after_fork() -> None:
    for work in list(_of_this_program):
        work.begin_after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _end_all(*processes: list[_Process]) -> None:
    for some in processes:
        while some:
            some.pop().end(kill=True)


def _failure(status: int, late: bool, bounds: WorkBounds) -> Exception:
    """Why a process has ended with this exit status."""
    if late or status == -signal.SIGALRM:
        return WorkFailedError(f"it takes more than {bounds.seconds} seconds")
    if status == OUT_OF_MEMORY:
        return WorkFailedError(f"it takes more than {bounds.memory_bytes >> 20} MiB of memory")
    if status == ANSWER_TOO_LARGE:
        return WorkFailedError(f"what it makes has more than {bounds.message_bytes >> 20} MiB")
    if status == 0:
        return _LeftError()
    if status == -signal.SIGKILL:
        return EngineOverloadedError("the system ended the process that prepared it; retry later")
    return WorkFailedError("whatever works on it breaks down")
