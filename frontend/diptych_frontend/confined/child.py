"""The inside of a process that works on what other people made. It imports nothing large itself."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from diptych_frontend.confined.frames import ConnectionEndedError, receive_frame, send_frame

IDLE_S: Final = 60.0
"""A process that nobody asked anything for so long ends: idle ones cost nothing."""
OUT_OF_MEMORY: Final = 77
"""Exit status of a process whose work wanted more memory than it may have."""


@dataclass(frozen=True, slots=True)
class WorkBounds:
    """What one piece of work may take."""

    memory_bytes: int
    """Address space, above what the process has when it begins to serve."""
    seconds: int
    message_bytes: int
    """A question has at most so many, and so has an answer."""


def serve(
    work: Callable[[bytearray, bytearray], tuple[bytes, memoryview]], bounds: WorkBounds
) -> None:
    """Answer what comes over standard input, a socket, until its other end is closed.

    A piece of work that exceeds its bounds ends the process: whoever asked sees by its exit status
    what happened, and starts another. The alarm rings here as well as at the owner, so that the
    process of an owner that was killed ends, too.
    """
    connection = socket.socket(fileno=os.dup(0))
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    limit = used + bounds.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            asked = receive_frame(connection, bounds.message_bytes, time.monotonic() + IDLE_S)
        except (ConnectionEndedError, TimeoutError):
            return
        signal.alarm(bounds.seconds)  # its default action ends a process that is in C code, too
        try:
            head, body = work(*asked)
            send_frame(connection, head, body, time.monotonic() + bounds.seconds)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except (ConnectionEndedError, TimeoutError):
            raise SystemExit(1) from None
        signal.alarm(0)
