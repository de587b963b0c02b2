"""The code inside a process that works on untrusted content. It imports nothing large itself."""

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
