"""The inside of a process that works on what other people made. It imports nothing large itself."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

from diptych_frontend.confined.frames import ConnectionEndedError, receive_frame, send_frame

OUT_OF_MEMORY: Final = 77
"""Exit status of a process whose work wanted more memory than it may have."""
ANSWER_TOO_LARGE: Final = 78
"""Exit status of a process whose answer is no message that its owner takes."""


@dataclass(frozen=True, slots=True)
class WorkBounds:
    """What one piece of work may take."""

    memory_bytes: int
    """Address space, above what the process has when it begins to serve."""
    seconds: int
    message_bytes: int
    """A question has at most so many, and so has an answer."""
    idle_seconds: int
    """A process that nobody asked anything for so long ends."""

    def as_argument(self) -> str:
        """How a process is told, as its only argument."""
        return json.dumps(asdict(self))


def serve(work: Callable[[bytearray, bytearray], tuple[bytes, memoryview]]) -> None:
    """Answer what comes over standard input, a socket, until its other end is closed.

    A piece of work that exceeds its bounds ends the process: whoever asked sees by its exit status
    what happened, and starts another. The alarm rings here as well as at the owner, so that the
    process of an owner that was killed ends, too.
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
