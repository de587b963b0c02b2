"""The processes of a `Nursery`.

Most of a start is imports: a router, two engines and their cores spent four seconds of a processor
on them. Here that is done once, beside the caller's own start, and by two processes, because a
router need not wait for torch:

    python -m diptych.laptop.nursery_process FD FD ROOM   forks routers, and what is not ours
        its child                                         forks engines, which fork their own cores

Each takes orders from a socket: a `Start` in JSON, with the socket of its leash and its log beside
it. Neither has threads, or sockets of ZMQ or UCX.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
from functools import partial
from typing import Final

import msgspec

from diptych.laptop import leash
from diptych.laptop.nursery import ENGINE, Start
from diptych_engine.execution.lean_torch import link_torch, start_lean
from diptych_frontend.core_client.launcher import CORE
from diptych_frontend.program import PROGRAMS, become
from diptych_protocol.threads import resolve_struct_types

ROUTER: Final = "diptych_router"
SHARED: Final = ("diptych_engine.pod", "numpy")
"""What routers and engines import."""
READ_LATER: Final = ("DIPTYCH_", "NODE_", "POD_")
"""How variables begin that no import reads. A pod that has others is started by an `execve`."""
MAX_ORDER_BYTES: Final = 1 << 17


def main(others: socket.socket, engines: socket.socket) -> None:
    """Import what both need, and fork: one imports the rest for routers, the other for engines."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a leash
    start_lean()
    resolve_struct_types()
    for module in SHARED:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    if os.fork():
        engines.close()
        _imported(ROUTER, "diptych_router.__main__")
        _serve(others)
        return
    others.close()
    content, rights = _order(engines)
    if content:
        link_torch()
        for name, module in ((CORE, CORE), (ENGINE, "diptych_engine.__main__")):
            _imported(name, module)
        _serve(engines, content, rights)


def _imported(name: str, module: str) -> None:
    """Have a program that forks can run. What cannot be imported is for the pod to tell."""
    with contextlib.suppress(Exception):
        PROGRAMS[name] = importlib.import_module(module).main


def _order(asked: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next order, and the descriptors beside it; an empty one is the caller's end."""
    received = array.array("i")
    room = socket.CMSG_SPACE(2 * received.itemsize)
    content, rights, _, _ = asked.recvmsg(MAX_ORDER_BYTES, room)
    for _, _, raw in rights:
        received.frombytes(raw)
    return content, list(received)


def _serve(asked: socket.socket, content: bytes = b"", rights: list[int] | None = None) -> None:
    """Fork a leash for each order, until the caller ends."""
    gc.freeze()  # pages that nobody writes to stay shared
    if not content:
        content, rights = _order(asked)
    while content:
        order = msgspec.json.decode(content, type=Start | None)
        if order is not None and rights and os.fork() == 0:
            asked.close()
            _hold(order, *rights)
            os._exit(0)
        for number in rights or ():
            os.close(number)
        content, rights = _order(asked)


def _hold(order: Start, control: int, log: int) -> None:
    """Be a pod's leash."""
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    os.environ.update(order.variables)
    with socket.socket(fileno=control) as supervisor:
        leash.hold(supervisor, order.niceness, partial(_run, order))


def _run(order: Start) -> None:
    """Be the pod."""
    python, option, name, *arguments = [*order.command, "", "", ""]
    del arguments[-3:]
    usual = all(variable.startswith(READ_LATER) for variable in order.variables)
    command = order.command
    if (python, option) == ("python", "-m") and name in PROGRAMS:
        if usual:
            become(name, arguments)
            return
        command = (python, "-P", *command[1:])
    try:
        os.execvp(command[0], command)
    except OSError as exc:
        sys.exit(f"cannot start {order.command[0]!r}: {exc.strerror}")


if __name__ == "__main__":
    main(*(socket.socket(fileno=int(number)) for number in sys.argv[1:3]))
