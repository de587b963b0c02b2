"""Runs our server programs: one event loop, one format of log lines, one line for an error, an exit
code. Some run in forks of a process that has imported them."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import uvloop

from diptych_protocol import UNREADABLE, DiptychError, InvalidRequestError
from diptych_protocol.threads import resolve_struct_types

PROGRAMS: Final[dict[str, Callable[[], None]]] = {}
"""What forks of this process can run, because it has imported it: the name of a module -> its
`main`. Empty but in what `diptych up` starts."""


def become(name: str, arguments: list[str]) -> None:
    """Run one of `PROGRAMS` in a process that was just forked, as `python -m` would."""
    signal.set_wakeup_fd(-1)  # of an event loop
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    gc.disable()  # as during imports; the program enables it
    sys.argv = [name, *arguments]
    _be_shown_as("python", "-m", name, *arguments)
    PROGRAMS[name]()


def _be_shown_as(*command: str) -> None:
    """Have another command line for `ps`, as far as there is room in that of the parent."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # `arg_start` and `arg_end`
    room = end - begin
    if room > 0:
        shown = "\0".join(command).encode(errors="replace")[: room - 1]
        ctypes.memmove(begin, shown.ljust(room, b"\0"), room)


def python_program(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of a process that imports from where this one does: not from
    the folder where the user happens to be, but also from that of the user's program."""
    places = os.pathsep.join(map(os.path.abspath, sys.path))
    return [sys.executable, "-P", "-m", module, *arguments], os.environ | {"PYTHONPATH": places}


def run_program(name: str, main: Coroutine[Any, Any, None]) -> None:
    """Run a program to its end. Exits with 2 for bad input and 1 for any other known failure."""
    # The kernel keeps signals without a handler from a container's first process: without this a
    # pod that is deleted while it starts would live until it is killed.
    signal.signal(signal.SIGTERM, _end)
    setup_logging(name)
    resolve_struct_types()
    gc.freeze()  # what was imported stays, and is not looked through while requests wait
    gc.enable()
    try:
        uvloop.run(main)
    except (InvalidRequestError, OSError, *UNREADABLE) as exc:
        sys.exit(_complain(name, exc, 2))
    except DiptychError as exc:
        sys.exit(_complain(name, exc, 1))


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _complain(name: str, error: Exception, code: int) -> int:
    print(f"diptych {name}: error: {error}", file=sys.stderr)
    return code


def setup_logging(name: str) -> None:
    """`DIPTYCH_LOG_LEVEL` (default INFO) sets the level; `name` is the process's name in each line.

    A crash of native code writes the Python stack of each thread there too.
    """
    faulthandler.enable()
    level = os.environ.get("DIPTYCH_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(
        level=level if level in logging.getLevelNamesMapping() else "INFO",
        format=f"%(asctime)s %(levelname).1s [{name}] %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )


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
