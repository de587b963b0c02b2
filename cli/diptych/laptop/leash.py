"""Kills one pod's processes as soon as its supervisor goes away, for whatever reason.

It runs as a script, with a socket as standard input. The arguments are the pod's niceness and its
command. The other end of the socket belongs to the supervisor:

    leash -> supervisor   the pod's process id, as a line of digits
    supervisor -> leash   `T`: send SIGTERM to the pod
    socket closed         SIGKILL to the pod's whole process group: also when the supervisor itself
                          was killed and could say nothing

The pod leads a session of its own. When it ends, the rest of its process group is killed, and the
leash exits with its code (128 + signal if a signal ended it). This file uses only the standard
library, because the leash must be small and start at once.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys

TERMINATE = b"T"
NOT_STARTED = 127
PR_SET_PDEATHSIG = 1


def main(niceness: int, command: list[str]) -> int:
    control = socket.socket(fileno=0)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    leash = os.getpid()
    pod = os.fork()
    if pod == 0:
        _become(niceness, command, leash)
    control.sendall(b"%d\n" % pod)
    while True:
        readable, _, _ = select.select([control.fileno(), wake_read], [], [])
        if control.fileno() in readable:
            try:
                order = control.recv(1)
            except OSError:
                order = b""
            if not order:
                return _end(pod)
            os.kill(pod, signal.SIGTERM)
        if wake_read in readable:
            os.read(wake_read, 64)
            # WNOWAIT leaves a zombie, so that the group's id cannot pass to others before the kill.
            if os.waitid(os.P_PID, pod, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return _end(pod)


def _end(pod: int) -> int:
    os.killpg(pod, signal.SIGKILL)
    _, status = os.waitpid(pod, 0)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _become(niceness: int, command: list[str], leash: int) -> None:
    """In the child: cut loose from the leash's own files and session, and run the pod."""
    try:
        os.setsid()
        _be_nice(niceness)
        _die_with(leash)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(command[0], command)
    except OSError as exc:
        os.write(2, f"cannot start {command[0]!r}: {exc.strerror}\n".encode())
    finally:
        os._exit(NOT_STARTED)


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


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
