"""Gigabytes a second: the transport by each way, and the machine's own limits, taken in turn."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from benchmarks.handoff.shapes import MEMORY_BYTES, Shape

from diptych_kv_transfer.memory.shard import MemoryRegion
from diptych_kv_transfer.signing.references import PUBLIC_KEY
from diptych_kv_transfer.tables.actions import Connected, PeerLost, Received, TransferEnded
from diptych_kv_transfer.transports.ucx.ucx_transport import UcxTransport

WAYS = {"cma": "all", "tcp": "tcp"}
"""Values of UCX_TLS."""
LIMIT_OF = {"cma": "process_vm_readv", "tcp": "tcp stream"}
Mover = Callable[[Shape], float]
"""Moves the blocks of a shape; returns the seconds it took."""


class Link:
    """Our end of a transport, its owner in another process, and what else they can do."""

    def __init__(self, way: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.handoff.owner"],
            env=os.environ | {"UCX_TLS": WAYS[way]}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.owner: dict[str, int] = json.loads(self.process.stdout.readline())
        self.memory = np.ones(MEMORY_BYTES, np.uint8)
        self.region = MemoryRegion.of(self.memory)
        self.transport = make_transport(way)
        self.tags = itertools.count(1)
        self.transport.connect(("127.0.0.1", self.owner["port"]))
        self.peer = self._expect(Connected).peer
        self.stream = socket.create_connection(("127.0.0.1", self.owner["stream_port"]))
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _expect(self, kind: type) -> Any:
        while True:
            for event in self.transport.poll(30.0):
                if isinstance(event, kind):
                    return event
                if isinstance(event, PeerLost):
                    raise RuntimeError("the owner of the blocks is gone")

    def by_transport(self, shape: Shape) -> float:
        """From the first byte on: the offer is here already, as it is with Opened."""
        tag = next(self.tags)
        request = [tag, shape.block_bytes, shape.count, shape.scattered]
        self.transport.send(self.peer, json.dumps(request).encode())
        self._expect(Received)
        regions = [self.region.part(at, length) for at, length in shape.spans()]
        started = time.perf_counter()
        self.transport.receive_blocks(self.peer, str(tag), tag, regions)
        ended = self._expect(TransferEnded)
        taken = time.perf_counter() - started
        if not ended.ok or self.memory[regions[-1].length - 1] != 7:
            raise RuntimeError(f"{shape.name} did not arrive")
        return taken

    def by_stream(self, shape: Shape) -> float:
        """One plain TCP connection, blocking sockets, the same buffers."""
        request = json.dumps([shape.block_bytes, shape.count, shape.scattered]).encode()
        views = [self.memory.data[at : at + length] for at, length in shape.spans()]
        started = time.perf_counter()
        self.stream.send(request)
        for view in views:
            left = view
            while left:
                left = left[self.stream.recv_into(left) :]
        return time.perf_counter() - started

    def by_reading(self, shape: Shape) -> float:
        """As few `process_vm_readv` as the kernel allows."""
        spans = np.array(shape.spans(), np.uint64)
        offset = np.array([1, 0], np.uint64)
        ours = np.ascontiguousarray(spans + offset * np.uint64(self.region.address))
        theirs = np.ascontiguousarray(spans + offset * np.uint64(self.owner["address"]))
        read = ctypes.CDLL(None).process_vm_readv
        read.restype = ctypes.c_ssize_t
        count = ctypes.c_ulong(len(spans))
        arguments = (
            ctypes.c_int(self.owner["pid"]),
            ctypes.c_void_p(ours.ctypes.data), count,
            ctypes.c_void_p(theirs.ctypes.data), count, ctypes.c_ulong(0),
        )  # fmt: skip
        started = time.perf_counter()
        got = read(*arguments)
        taken = time.perf_counter() - started
        if got != shape.num_bytes:
            raise RuntimeError(f"process_vm_readv read {got} of {shape.num_bytes} bytes")
        return taken

    def close(self) -> None:
        self.stream.close()
        self.transport.close()
        self.process.wait(10)


def make_transport(way: str) -> UcxTransport:
    """A transport that is told its way as an engine is: by the environment."""
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = WAYS[way]
    try:
        return UcxTransport("127.0.0.1", 0, PUBLIC_KEY)
    finally:
        del os.environ["UCX_TLS"]
        if before is not None:
            os.environ["UCX_TLS"] = before


def by_copying() -> Mover:
    """numpy's copy within one process: what memory allows."""
    source, target = np.full(MEMORY_BYTES, 7, np.uint8), np.ones(MEMORY_BYTES, np.uint8)

    def move(shape: Shape) -> float:
        spans = shape.spans()
        started = time.perf_counter()
        for at, length in spans:
            target[at : at + length] = source[at : at + length]
        return time.perf_counter() - started

    return move


def run(shapes: list[Shape], repetitions: int) -> list[dict[str, Any]]:
    """GB/s of every way for every shape, and each way's part of its limit.

    Ways take turns, so that whatever else the machine does meets all of them; a part is the
    median of the quotients of neighbours in time.
    """
    links = {way: Link(way) for way in WAYS}
    movers: dict[str, Mover] = {
        "memcpy": by_copying(),
        "process_vm_readv": links["cma"].by_reading,
        "cma": links["cma"].by_transport,
        "tcp stream": links["tcp"].by_stream,
        "tcp": links["tcp"].by_transport,
    }
    rows = []
    try:
        for shape in shapes:
            for move in movers.values():
                move(shape)  # the first time pays for page tables
            seconds = [{name: move(shape) for name, move in movers.items()}
                       for _ in range(repetitions)]  # fmt: skip
            rows.append(summarise(shape, seconds))
    finally:
        for link in links.values():
            link.close()
    return rows


def summarise(shape: Shape, seconds: list[dict[str, float]]) -> dict[str, Any]:
    speeds = {
        name: sorted(shape.num_bytes / once[name] / 1e9 for once in seconds) for name in seconds[0]
    }
    parts = {
        way: sorted(once[limit] / once[way] for once in seconds) for way, limit in LIMIT_OF.items()
    }
    return {
        "shape": shape.name,
        "block_kib": shape.block_bytes >> 10,
        "count": shape.count,
        "scattered": shape.scattered,
        "gb_per_s": {name: spread(values) for name, values in speeds.items()},
        "part_of_limit": {way: spread(values) for way, values in parts.items()},
    }


def spread(values: list[float]) -> dict[str, float]:
    """The median, the lowest and the highest of sorted values."""
    return {"median": statistics.median(values), "low": values[0], "high": values[-1]}
