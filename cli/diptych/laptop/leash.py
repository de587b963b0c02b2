"""Kills one pod's processes as soon as its supervisor goes away, for whatever reason.

It is a process that the nursery forks. A socket of datagrams connects it with the supervisor:

    leash -> supervisor   the pod's process id, in digits
    supervisor -> leash   `T`: send SIGTERM to the pod
    leash -> supervisor   the pod's exit code, in digits: 128 + signal if a signal ended it
    socket closed         SIGKILL to the pod's whole process group: also when the supervisor itself
                          was killed and could say nothing

The pod leads a session of its own. When it ends, the rest of its process group is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import sys
from collections.abc import Callable

TERMINATE = b"T"
NOT_STARTED = 127
MAX_DESCRIPTORS = 256
PR_SET_PDEATHSIG = 1


def hold(control: socket.socket, niceness: int, run: Callable[[], None]) -> None:
    """Fork a pod, which calls `run`, and hold it until it ends or the supervisor does."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    leash = os.getpid()
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_become, args=(niceness, leash, run))
    process.start()
    pod = process.ident or 0
    _tell(control, pod)
    while True:
        readable, _, _ = select.select([control.fileno(), wake_read], [], [])
        if control.fileno() in readable:
            try:
                order = control.recv(1)
            except OSError:
                order = b""
            if not order:
                return _tell(control, _end(pod))
            os.kill(pod, signal.SIGTERM)
        if wake_read in readable:
            os.read(wake_read, 64)
            # WNOWAIT leaves a zombie, so that the group's id cannot pass to others before the kill.
            if os.waitid(os.P_PID, pod, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return _tell(control, _end(pod))


def _tell(control: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the supervisor was killed
        control.send(b"%d" % number)


def _end(pod: int) -> int:
    os.killpg(pod, signal.SIGKILL)
    _, status = os.waitpid(pod, 0)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _become(niceness: int, leash: int, run: Callable[[], None]) -> None:
    """In the child: cut loose from the leash's own files and session, and run the pod."""
    os.closerange(3, MAX_DESCRIPTORS)
    os.setsid()
    _be_nice(niceness)
    _die_with(leash)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    run()


def _be_nice(niceness: int) -> None:
    """Give way to others. Linux may weigh sessions, not processes, against each other."""
    os.nice(niceness)
    try:
        with open("/proc/self/autogroup", "w") as autogroup:
            autogroup.write(str(niceness))
    except OSError:
        pass  # a system without autogroups


def _die_with(leash: int) -> None:
    """Linux: should even the leash be killed, the pod follows."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != leash:
            os._exit(NOT_STARTED)
