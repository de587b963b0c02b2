"""Reads the memory of another process of this host: one-sided gets of UCX over its transport cma.

They have a UCX context of their own, without transports that reach beyond the host, because where
UCX does one-sided operations in software it lets a peer read and write all memory. The process that
is read takes no part in it; the kernel decides who may read.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import time
from collections.abc import Sequence
from ctypes import byref, c_size_t, c_void_p
from pathlib import Path

import numpy as np

from diptych_kv_transfer.memory.shard import MemoryRegion
from diptych_kv_transfer.transports.ucx import libucp, requests
from diptych_kv_transfer.transports.ucx.frames import Introduction, Span
from diptych_kv_transfer.transports.ucx.libucp import UcpError, check, lib
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
"""So many take a few milliseconds, after which the reader can do other work."""
TIMEOUT_S = 5.0
"""A system call that copies BYTES_AT_ONCE takes milliseconds, so this is far beyond normal."""
SHARED_MEMORY = frozenset({"sm", "shm", "mm", "posix", "sysv", "xpmem", "knem", "cma"})
"""Names in UCX_TLS of transports that stay on the host."""


class ReadableMemory:
    """A region that peers may read, with its `key`, as long as this object is open."""

    def __init__(self, context: Context, region: MemoryRegion) -> None:
        """Raises `UcpError`."""
        self._context, self._region, self._handle = context, region, c_void_p()
        params = libucp.MemMapParams(
            field_mask=libucp.MEM_MAP_PARAM_FIELD_ADDRESS | libucp.MEM_MAP_PARAM_FIELD_LENGTH,
            address=region.address,
            length=region.length,
        )
        status = lib.ucp_mem_map(context.handle, byref(params), byref(self._handle))
        check(status, "registering memory")
        packed, length = c_void_p(), c_size_t()
        status = lib.ucp_rkey_pack(context.handle, self._handle, byref(packed), byref(length))
        check(status, "packing a memory key")
        self.key = ctypes.string_at(packed, length.value)
        """Packed, for `unpack_key` of a peer."""
        lib.ucp_rkey_buffer_release(packed)

    def close(self) -> None:
        """Close it. Call this once."""
        lib.ucp_mem_unmap(self._context.handle, self._handle)


def unpack_key(endpoint: int, packed: bytes) -> int:
    """Return a peer's key for use on its endpoint, until `destroy_key`. Raises `UcpError`."""
    key = c_void_p()
    check(lib.ucp_ep_rkey_unpack(endpoint, packed, byref(key)), "unpacking a memory key")
    return int(key.value or 0)


def destroy_key(key: int) -> None:
    lib.ucp_rkey_destroy(key)


class SameHost:
    """Lets processes of this host read our memory, and reads theirs."""

    def __init__(self) -> None:
        """Raises `UcpError` when UCX cannot do this here."""
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
            host_name(), self._worker.address, self._readable.key, region.address, probe
        )

    def meet(self, other: Introduction) -> OtherProcess | None:
        """Return a process of this host that lets us read its memory; None without one."""
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
        """Close it. Call this once, after every `OtherProcess` is closed."""
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
        """Close it. Call this once."""
        destroy_key(self.key)
        try:
            self._endpoint.close()
        except UcpError as exc:  # nothing is read into our memory once its worker is gone
            log.error("%s", exc)
        self.worker.close()


class Reading:
    """Reads runs of another process's memory into ours."""

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
        """Read the next few runs, and return when they have been read.

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
    """Return a name that is equal in processes that know each other by pid."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def may_read() -> bool:
    """Whether UCX_TLS, which limits UCX's transports, allows this one."""
    names, negated = _ucx_tls()
    listed = not names.isdisjoint({"all", "cma", "sm", "shm"})
    return listed != negated


def network_transports() -> str:
    """Return UCX_TLS for connections: the environment's, without transports of one host.

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
