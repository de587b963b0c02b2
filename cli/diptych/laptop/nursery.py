"""Starts the pods of this machine by forks of processes that have imported our programs; see
`nursery_process`."""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Final

import msgspec

from diptych.errors import RunError

ENGINE: Final = "diptych_engine"
"""The program whose imports take longest."""
ROOM: Final = " " * 4096
"""The command line of a fork has as much room as that of its parent."""


class Start(msgspec.Struct, array_like=True):
    """A pod to be started."""

    command: tuple[str, ...]
    niceness: int
    variables: dict[str, str]
    """Its own, beside those of the nursery."""


class Nursery:
    """Two processes that import while their caller does other things, and end with it."""

    def __init__(self) -> None:
        """Raises `RunError` in a folder that is no more: torch cannot be loaded there."""
        try:
            os.getcwd()
        except FileNotFoundError as exc:
            raise RunError("the folder you are in has been deleted; go to another one") from exc
        # The running interpreter's programs come first, so that `python` is this Python.
        path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
        # Engines share the cores here: an OpenMP thread that waits must not spin on one.
        sharing = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}
        self._variables = os.environ | sharing | {"PATH": path, "PYTHONUNBUFFERED": "1"}
        self._begin()

    def _begin(self) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        (self._others, first), (self._engines, second) = pairs
        numbers = [first.fileno(), second.fileno()]
        with first, second:
            self._process = subprocess.Popen(
                # -P: nothing is imported from the folder where the user happens to be.
                [sys.executable, "-P", "-m", f"{__name__}_process", *map(str, numbers), ROOM],
                stdin=subprocess.DEVNULL,
                env=self._variables,
                pass_fds=numbers,
                start_new_session=True,
            )

    def expect_engines(self) -> None:
        """Have imported what our engines need."""
        self._engines.send(msgspec.json.encode(None))

    def start(self, order: Start, control: socket.socket, log: int) -> None:
        """Start a pod, whose leash has one end of `control`. Raises `OSError` if it cannot."""
        rights = array.array("i", [control.fileno(), log])
        sent = [msgspec.json.encode(order)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        try:
            self._of(order).sendmsg(*sent)
        except OSError:  # it was killed; whom it has started lives on
            self._others.close()
            self._engines.close()
            self._process.wait()
            self._begin()
            self._of(order).sendmsg(*sent)

    def _of(self, order: Start) -> socket.socket:
        return self._engines if ENGINE in order.command else self._others

    def close(self) -> None:
        """End it, when all pods have ended: what it imports is not waited for."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._others.close()
        self._engines.close()
        self._process.wait()
