"""Hosts of their own on this machine, joined by a wire that misbehaves on request.

Each host is a network namespace with one TUN device, and a thread that lives there; host 0 is the
machine's own namespace. Another thread carries IP packets between the devices, and on the way
loses, delays, doubles or holds them back. Unlike `tc netem` this needs no kernel module; like it,
it needs root on Linux.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import heapq
import itertools
import os
import random
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 1 << 18
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU = 0x8916, 0x891C, 0x8922
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
MTU = 9000
MAX_QUEUED = 20_000
"""Packets under way; more are lost."""
TCP, RST = 6, 0x04
_libc = ctypes.CDLL(None, use_errno=True)


@functools.cache
def why_no_networks() -> str:
    """Why this machine cannot have them; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with FaultyNetwork(2, random.Random(0)):
            return ""
    except OSError as exc:
        return f"no network namespaces with TUN devices here: {exc}"


@dataclass(frozen=True)
class Weather:
    """What happens to packets from one host to another."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """At most so much more, for each packet anew: they overtake each other."""
    loss: float = 0.0
    duplicate: float = 0.0
    reset: bool = False
    """Whoever says something in a TCP connection is told that it is gone."""


CALM = Weather()
BLACK_HOLE = Weather(loss=1.0)


class FaultyNetwork:
    """Hosts 0 to `num_hosts` - 1; see the module. A context manager."""

    def __init__(self, num_hosts: int, rng: random.Random) -> None:
        """Raises `OSError` where this is not possible."""
        self._rng = rng
        self._weather: dict[tuple[int, int], Weather] = {}
        """(from, to) -> what is not calm."""
        # Of no account for what happens, and nobody else's on this machine.
        self._subnet = f"10.{200 + secrets.randbelow(55)}.{secrets.randbelow(256)}"
        self._stack = contextlib.ExitStack()
        self._hosts: list[ThreadPoolExecutor | None] = []
        self._devices: list[int] = []
        try:
            for host in range(num_hosts):
                self._add_host(host)
        except OSError:
            self._stack.close()
            raise
        self._stop = os.eventfd(0)
        self._stack.callback(os.close, self._stop)
        self._thread = threading.Thread(target=self._carry, name="faulty network", daemon=True)
        self._thread.start()

    def __enter__(self) -> FaultyNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join(10.0)
        self._stack.close()

    def address(self, host: int) -> str:
        return f"{self._subnet}.{host + 1}"

    def device(self, host: int) -> str:
        _, second, third = self._subnet.split(".")
        return f"chaos{second}{third}-{host}"

    def run(self, host: int, work: Callable[[], T]) -> T:
        """Do something on that host. What it starts and opens there stays there."""
        thread = self._hosts[host]
        return work() if thread is None else thread.submit(work).result()

    def between(self, one: int, other: int, weather: Weather, *, both_ways: bool = True) -> None:
        """Change the weather from one host to another."""
        self._weather[one, other] = weather
        if both_ways:
            self._weather[other, one] = weather

    def clear_up(self) -> None:
        """Calm everywhere."""
        self._weather = {}

    # --- setting up ---------------------------------------------------------------------------

    def _add_host(self, host: int) -> None:
        thread = None
        if host > 0:
            thread = self._stack.enter_context(ThreadPoolExecutor(1, f"host {host}"))
            thread.submit(_move_out).result()
        self._hosts.append(thread)
        device = self.run(host, lambda: self._make_device(host))
        self._stack.callback(os.close, device)
        self._devices.append(device)

    def _make_device(self, host: int) -> int:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        name = self.device(host)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            for request, value in (
                (SIOCSIFADDR, _socket_address(self.address(host))),
                (SIOCSIFNETMASK, _socket_address("255.255.255.0")),
                (SIOCSIFMTU, struct.pack("i20x", MTU)),
            ):
                fcntl.ioctl(control, request, struct.pack("16s", name.encode()) + value)
        _raise_interface(name)
        return device

    # --- the wire -----------------------------------------------------------------------------

    def _carry(self) -> None:
        poller = select.epoll()
        for descriptor in (*self._devices, self._stop):
            poller.register(descriptor, select.EPOLLIN)
        under_way: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        with contextlib.closing(poller):
            while True:
                timeout = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
                for descriptor, _ in poller.poll(timeout):
                    if descriptor == self._stop:
                        return
                    for packet in _packets(descriptor):
                        for at, host, copy in self._fate(packet):
                            if len(under_way) < MAX_QUEUED:
                                heapq.heappush(under_way, (at, next(numbers), host, copy))
                now = time.monotonic()
                while under_way and under_way[0][0] <= now:
                    _, _, host, packet = heapq.heappop(under_way)
                    with contextlib.suppress(OSError):  # its queue is full: the packet is lost
                        os.write(self._devices[host], packet)

    def _fate(self, packet: bytes) -> Iterator[tuple[float, int, bytes]]:
        """When, where and what arrives because of a packet."""
        source, target = packet[15] - 1, packet[19] - 1
        if packet[0] >> 4 != 4 or not (
            0 <= target < len(self._devices) and 0 <= source < len(self._devices)
        ):
            return
        now = time.monotonic()
        weather = self._weather.get((source, target), CALM)
        if weather.reset and packet[9] == TCP:
            for at_source in (True, False):
                yield now, source if at_source else target, _reset_for(packet, at_source)
            return
        if weather.loss and self._rng.random() < weather.loss:
            return
        copies = 2 if weather.duplicate and self._rng.random() < weather.duplicate else 1
        for _ in range(copies):
            jitter = self._rng.random() * weather.jitter_s if weather.jitter_s else 0.0
            yield now + weather.delay_s + jitter, target, packet


def _packets(device: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        while True:
            yield os.read(device, MTU + 64)


def _reset_for(packet: bytes, at_source: bool) -> bytes:
    """The segment that ends a packet's connection, for its sender or for its receiver."""
    header = (packet[0] & 15) * 4
    sender, receiver = packet[12:16], packet[16:20]
    ports, sequence, acknowledged = (
        packet[header : header + 4],
        packet[header + 4 : header + 8],
        packet[header + 8 : header + 12],
    )
    if at_source:
        sender, receiver, ports, sequence = receiver, sender, ports[2:] + ports[:2], acknowledged
    segment = ports + sequence + struct.pack(">IBBHHH", 0, 5 << 4, RST, 0, 0, 0)
    pseudo = sender + receiver + struct.pack(">BBH", 0, TCP, len(segment))
    segment = segment[:16] + _checksum(pseudo + segment) + segment[18:]
    ip = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(segment), 0, 0, 64, TCP, 0) + sender + receiver
    return ip[:10] + _checksum(ip) + ip[12:] + segment


def _checksum(data: bytes) -> bytes:
    """The internet checksum of an even number of bytes."""
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack(">H", ~total & 0xFFFF)


def _socket_address(address: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address)) + bytes(8)


def _raise_interface(name: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH22x", name.encode(), 0)
        answer = fcntl.ioctl(control, SIOCGIFFLAGS, request)
        flags = struct.unpack("16xH22x", answer)[0] | IFF_UP
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), flags))


def _move_out() -> None:
    """Put this thread into a network of its own, and where it sees that one's devices."""
    _check(_libc.unshare(CLONE_NEWNET | CLONE_NEWNS))
    _check(_libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    _check(_libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))  # UCX looks there for devices
    _raise_interface("lo")


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
