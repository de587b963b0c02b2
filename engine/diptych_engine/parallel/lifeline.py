"""Ends a child process with its parent, however the parent ends."""

from __future__ import annotations

import os
import select
import signal
import threading


def die_with_parent(parent_pid: int) -> None:
    """End this process as soon as its parent has ended."""
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        raise SystemExit(0) from None
    if os.getppid() != parent_pid:  # the id is another process's by now
        raise SystemExit(0)
    # Not Linux's PR_SET_PDEATHSIG: it is sent when the thread ends that started the child, and an
    # engine may be made in a thread that ends before its process.
    threading.Thread(target=_end_after, args=(parent,), name="lifeline", daemon=True).start()


def _end_after(parent: int) -> None:
    """Wait for the parent's end. Nobody is left who could be told, so nothing is tidied up."""
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
