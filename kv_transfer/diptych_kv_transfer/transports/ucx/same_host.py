"""Reading the memory of another process of this host: one-sided gets of UCX over its cma.

They have a UCX context to themselves, without anything that reaches beyond the host: where UCX does
one-sided operations in software it lets a peer read and write all memory. The process that is read
takes no part, nor notices; the kernel decides who may.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diptych_kv_transfer.memory.region import MemoryRegion
from diptych_kv_transfer.transports.ucx import libucp, requests
from diptych_kv_transfer.transports.ucx.frames import Introduction, Span
from diptych_kv_transfer.transports.ucx.libucp import UcpError
from diptych_kv_transfer.transports.ucx.readable_memory import (
    ReadableMemory,
    destroy_key,
    unpack_key,
)
from diptych_kv_transfer.transports.ucx.worker import Context, Worker

log = logging.getLogger(__name__)

RUN_BYTES = 2 << 20
RUNS_AT_ONCE = 64
OPTIONS = {
    "TLS": "posix,cma",  # cma reads; UCX will not have it alone
    # A process that cannot be read is an error, and not the end of this one.
    "POSIX_ERROR_HANDLING": "y",
    "CMA_MEMORY_INVALIDATE": "y",
    "CMA_SEG_SIZE": str(RUN_BYTES),
    "CMA_TX_QUOTA": str(RUNS_AT_ONCE),  # system calls per call of ours
}
BYTES_AT_ONCE = 16 << 20
"""A few milliseconds; whoever reads may have others to attend to between two calls."""
TIMEOUT_S = 5.0
"""A system call that copies so much takes milliseconds."""
SHARED_MEMORY = frozenset({"sm", "shm", "mm", "posix", "sysv", "xpmem", "knem", "cma"})
"""Names in UCX_TLS of what does not leave the host."""


class SameHost:
    """Our memory, as processes of this host may read it, and theirs, as we may."""

    def __init__(self) -> None:
        """Raises `UcpError` when UCX has no way of doing this here."""
        self._context = Context(OPTIONS, libucp.FEATURE_RMA)
        probe = secrets.token_bytes(16)
        region = MemoryRegion.of(np.frombuffer(bytearray(probe), np.uint8))
        try:
            self._worker = Worker(self._context)
            # Any memory of a process makes a key for all of it, where the kernel checks accesses.
            self._readable = ReadableMemory(self._context, region)
        except UcpError:
            self._context.close()
            raise
        self.introduction = Introduction(
            host_name(),
            self._worker.address,
            self._readable.key,
            region.address,
            probe,
        )

    def meet(self, other: Introduction) -> OtherProcess | None:
        """A process that is here and lets us read its memory; None: it is not or does not."""
        if other.host != self.introduction.host:
            return None
        found = np.zeros(len(other.probe), np.uint8)
        process: OtherProcess | None = None
        try:
            process = OtherProcess(self._context, other)
            spans = [(other.probe_address, found.size)]
            Reading(process, spans, [found.ctypes.data]).advance()
        except UcpError as exc:
            log.info("cannot read the memory of a process on this host: %s", exc)
        if process is not None and found.tobytes() != other.probe:
            process.close()
            return None
        return process

    def close(self) -> None:
        """To be called once, after every `OtherProcess` is closed."""
        self._readable.close()
        self._worker.close()
        self._context.close()


class OtherProcess:
    """A process whose memory can be read."""

    def __init__(self, context: Context, other: Introduction) -> None:
        """Raises `UcpError`."""
        # It has a worker to itself, so that giving one up for good leaves the others.
        self.worker = Worker(context)
        try:
            self._endpoint = self.worker.reach(other.address)
            self.handle = self._endpoint.handle
            self.key = unpack_key(self.handle, other.key)
        except UcpError:
            self.worker.close()
            raise

    def close(self) -> None:
        """To be called once."""
        destroy_key(self.key)
        try:
            self._endpoint.close()
        except UcpError as exc:  # nothing is read into our memory once its worker is gone
            log.error("%s", exc)
        self.worker.close()


class Reading:
    """Runs of another process's memory on their way into ours."""

    def __init__(
        self, process: OtherProcess, sources: Sequence[Span], targets: Sequence[int]
    ) -> None:
        """Source i goes to address `targets[i]`, which has room for it."""
        self._process = process
        self._pieces = [
            (target + at, min(RUN_BYTES, length - at), source + at)
            for (source, length), target in zip(sources, targets, strict=True)
            for at in range(0, length, RUN_BYTES)
        ]
        self._next = 0

    @property
    def done(self) -> bool:
        return self._next == len(self._pieces)

    def advance(self) -> None:
        """Read the next few runs; none is under way afterwards.

        Raises `UcpError` when they cannot be read.
        """
        begun: list[int] = []
        num_bytes = 0
        handle, key = self._process.handle, self._process.key
        try:
            while not self.done and len(begun) < RUNS_AT_ONCE and num_bytes < BYTES_AT_ONCE:
                piece = self._pieces[self._next]
                begun.append(requests.get(handle, *piece, key))
                num_bytes += piece[1]
                self._next += 1
        finally:
            self._complete(begun)

    def _complete(self, begun: list[int]) -> None:
        progress = self._process.worker.progress
        failed = 0
        deadline = time.monotonic() + TIMEOUT_S
        for request in begun:
            while (status := requests.status_of(request)) == libucp.IN_PROGRESS:
                if time.monotonic() > deadline:
                    # Only its worker's progress would go on with it, and nobody calls that again.
                    raise UcpError("UCX does not end reading another process")
                progress()
            failed = failed or status
            requests.free(request)
        if failed:
            raise UcpError(f"reading another process: UCX status {failed}")


def host_name() -> str:
    """What processes have in common that may know each other by pid."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def may_read() -> bool:
    """Whether UCX_TLS, which says how blocks may travel, leaves this way open."""
    names, negated = _ucx_tls()
    listed = not names.isdisjoint({"all", "cma", "sm", "shm"})
    return listed != negated


def network_transports() -> str:
    """UCX_TLS for connections: what the environment says, without what does not leave the host.

    Raises `OSError` when nothing is left.
    """
    names, negated = _ucx_tls()
    if negated or "all" in names:
        return "^" + ",".join(sorted((names - {"all"} if negated else set()) | {"sm"}))
    if not names - SHARED_MEMORY:
        raise OSError("UCX_TLS names no transport between hosts: add tcp, for example")
    return ",".join(sorted(names - SHARED_MEMORY))


def _ucx_tls() -> tuple[set[str], bool]:
    """The names in UCX_TLS, and whether they are those not to use."""
    value = os.environ.get("UCX_TLS") or "all"
    return set(value.lstrip("^").split(",")), value.startswith("^")
