"""Reading the memory of another process of this host, by `process_vm_readv`.

This is what UCX calls cma. UCX makes one system call and one request of ours for each run; here one
call reads hundreds of them, and the interpreter's lock is given up once, not once a run.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diptych_kv_transfer.frames import Process, Span

MAX_VECTORS = 1024
"""IOV_MAX of Linux."""
MAX_BYTES_AT_ONCE = 16 << 20
"""About a millisecond; whoever reads may have others to attend to between two calls."""

_read = ctypes.CDLL(None, use_errno=True).process_vm_readv
_read.restype = ctypes.c_ssize_t
_VECTORS = (ctypes.c_void_p, ctypes.c_ulong)
_read.argtypes = (ctypes.c_int, *_VECTORS, *_VECTORS, ctypes.c_ulong)

_probe = ctypes.create_string_buffer(secrets.token_bytes(16), 16)


def this_process() -> Process:
    """How others may read our memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return Process(host, os.getpid(), ctypes.addressof(_probe), _probe.raw)


def is_allowed() -> bool:
    """Whether UCX_TLS, which says how blocks may travel, leaves this way open."""
    names = os.environ.get("UCX_TLS", "all")
    listed = {"all", "cma", "sm", "shm"} & set(names.lstrip("^").split(","))
    return bool(listed) != names.startswith("^")


def can_read(process: Process, me: Process) -> bool:
    """Whether this is a process of our host that lets us read its memory."""
    if process.host != me.host:
        return False
    found = np.zeros(len(process.probe), np.uint8)
    try:
        read = Reading(process.pid, [(process.probe_address, found.size)], [address_of(found)])
        read.advance()
    except OSError:
        return False
    return found.tobytes() == process.probe


def address_of(buffer: NDArray[np.uint8]) -> int:
    """Where an array's bytes are."""
    address: int = buffer.__array_interface__["data"][0]
    return address


class Reading:
    """Runs of another process's memory on their way into ours."""

    def __init__(self, pid: int, sources: Sequence[Span], targets: Sequence[int]) -> None:
        """Source i goes to address `targets[i]`, which has room for it."""
        self._pid = pid
        pieces = [
            (source + at, target + at, min(MAX_BYTES_AT_ONCE, length - at))
            for (source, length), target in zip(sources, targets, strict=True)
            for at in range(0, length, MAX_BYTES_AT_ONCE)
        ]
        self._pieces = np.array(pieces, np.uint64).reshape(-1, 3)
        self._next = 0

    @property
    def done(self) -> bool:
        return self._next == len(self._pieces)

    def advance(self) -> None:
        """Read the next few runs. Raises `OSError` when they cannot be read."""
        if self.done:
            return
        pieces = self._pieces[self._next : self._next + MAX_VECTORS]
        fit = int(np.searchsorted(np.cumsum(pieces[:, 2]), MAX_BYTES_AT_ONCE, "right"))
        pieces = pieces[: max(fit, 1)]
        theirs = np.ascontiguousarray(pieces[:, (0, 2)])
        ours = np.ascontiguousarray(pieces[:, (1, 2)])
        wanted = int(pieces[:, 2].sum())
        count = len(pieces)
        got = _read(self._pid, ours.ctypes.data, count, theirs.ctypes.data, count, 0)
        if got != wanted:
            error = ctypes.get_errno() if got < 0 else 0
            raise OSError(error, f"read {got} of {wanted} bytes of process {self._pid}")
        self._next += count
