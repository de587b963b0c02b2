"""Blocks over plain TCP: one connection for each of the hinge's, from the receiver to the sender.

The receiver opens it with a token, then asks for transfers by their tags, eight bytes each; the
sender writes their bytes in that order, and nothing else. A receiver that has closed its socket
cannot be written to any more, which UCX over TCP does not promise for one-sided writes.

Nothing here waits. Sockets are watched for edges: they are used until they would block.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import secrets
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence

from diptych_kv_transfer.actions import Address
from diptych_kv_transfer.transport import Buffer

MAX_VECTORS = 64
"""Buffers named in one system call: what a socket takes at once is seldom more."""
LOW_WATER_BYTES = 256 << 10
"""A receiver sleeps until so much has come: waking up costs more than copying this."""
MAX_BYTES_AT_ONCE = 16 << 20
"""What one connection may move before the others have their turn."""
TOKEN_BYTES, TAG_BYTES = 16, 8
MAX_STRANGERS = 256
"""Connections that have not said what they are for; the oldest goes when one more comes."""
EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class Queue:
    """Buffers on their way through a socket, in order."""

    def __init__(self) -> None:
        self._views: deque[memoryview] = deque()
        self._left: deque[tuple[int, int]] = deque()
        """(tag, bytes still to go) of each transfer."""
        self._finished: list[int] = []

    def add(self, tag: int, buffers: Sequence[Buffer]) -> None:
        """Let a transfer's buffers go after those of earlier ones."""
        self._views.extend(buffer.data for buffer in buffers if buffer.size)
        self._left.append((tag, sum(buffer.nbytes for buffer in buffers)))
        self._count(0)

    @property
    def bytes_left(self) -> int:
        """Until the first transfer is through; 0: there is none."""
        return self._left[0][1] if self._left else 0

    def take_finished(self) -> list[int]:
        """Tags of the transfers that got through since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def pump(self, move: Callable[[list[memoryview]], int]) -> bool:
        """Move bytes until it would block; True: there is more to move at once.

        Raises `OSError` when the connection is broken.
        """
        budget = MAX_BYTES_AT_ONCE
        while self._views and budget > 0:
            try:
                moved = move(list(itertools.islice(self._views, MAX_VECTORS)))
            except BlockingIOError:
                return False
            if moved == 0:
                raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
            budget -= moved
            self._drop(moved)
            self._count(moved)
        return bool(self._views)

    def _drop(self, moved: int) -> None:
        """Forget the views that are through."""
        while self._views and moved >= len(self._views[0]):
            moved -= len(self._views.popleft())
        if moved:
            self._views[0] = self._views[0][moved:]

    def _count(self, moved: int) -> None:
        """Note which transfers are through."""
        while self._left:
            tag, left = self._left[0]
            if left > moved:
                self._left[0] = (tag, left - moved)
                return
            moved -= left
            self._left.popleft()
            self._finished.append(tag)


class Receiver:
    """The receiver's end of one connection."""

    def __init__(self, address: Address, token: bytes, epoll: select.epoll) -> None:
        """Begin to connect. Raises `OSError`."""
        self.queue = Queue()
        self._to_say = token
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        self._socket = socket.socket(found[0][0], socket.SOCK_STREAM)
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._socket.connect(found[0][4])
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        epoll.register(self._socket, EDGES)

    def ask(self, tag: int, buffers: Sequence[Buffer]) -> None:
        """Have a transfer's bytes sent into buffers, after those of earlier ones."""
        self._to_say += tag.to_bytes(TAG_BYTES, "little")
        self.queue.add(tag, buffers)

    def advance(self) -> bool:
        """Receive what has come; True: there is more at once. Raises `OSError`."""
        try:
            while self._to_say:
                self._to_say = self._to_say[self._socket.send(self._to_say) :]
        except BlockingIOError:
            return False
        more = self.queue.pump(lambda views: self._socket.recvmsg_into(views)[0])
        if not more and self.queue.bytes_left:
            low_water = min(self.queue.bytes_left, LOW_WATER_BYTES)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
        return more

    def close(self) -> None:
        """Nothing is received any more."""
        self._socket.close()


class Sender:
    """The sender's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.queue = Queue()
        self._socket = connection
        self._heard = b""

    def hear(self, num_bytes: int) -> bytes | None:
        """The next so many bytes that the receiver said; None: not here yet.

        Raises `OSError`, also when it has gone.
        """
        try:
            data = self._socket.recv(num_bytes - len(self._heard))
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
        self._heard += data
        if len(self._heard) < num_bytes:
            return None
        heard, self._heard = self._heard, b""
        return heard

    def advance(self) -> bool:
        """Send what fits; True: more fits at once. Raises `OSError`."""
        return self.queue.pump(self._socket.sendmsg)

    def close(self) -> None:
        """Nothing is sent any more."""
        self._socket.close()


class Door:
    """Where receivers connect to."""

    def __init__(self, host: str, epoll: select.epoll) -> None:
        """Listen on any port of an address. Raises `OSError`."""
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, 0), family=family)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._epoll = epoll
        epoll.register(self._socket, select.EPOLLIN)
        self._expected: dict[bytes, Callable[[Sender], None]] = {}
        self._strangers: deque[Sender] = deque()

    def expect(self, welcome: Callable[[Sender], None]) -> bytes:
        """A token for one connection; whoever brings it is handed over."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._expected[token] = welcome
        return token

    def forget(self, token: bytes) -> None:
        """Nobody is expected with this token any more."""
        self._expected.pop(token, None)

    def advance(self) -> None:
        """Let in who knocks."""
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                connection, _ = self._socket.accept()
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._epoll.register(connection, EDGES)
                self._strangers.append(Sender(connection))
        while len(self._strangers) > MAX_STRANGERS:
            self._strangers.popleft().close()
        for stranger in list(self._strangers):
            self._identify(stranger)

    def _identify(self, stranger: Sender) -> None:
        try:
            token = stranger.hear(TOKEN_BYTES)
        except OSError:
            token = b""
        if token is None:
            return
        self._strangers.remove(stranger)
        welcome = self._expected.pop(token, None)
        if welcome is None:
            stranger.close()
        else:
            welcome(stranger)

    def close(self) -> None:
        """Turn everybody away."""
        for stranger in self._strangers:
            stranger.close()
        self._socket.close()
