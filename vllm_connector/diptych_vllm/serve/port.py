"""The socket at which a vLLM server speaks the wire, on the event loop of its API server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Final

import zmq

from diptych_frontend.core_client.client import receive_frames, send_frames
from diptych_frontend.core_client.core_socket import Farewell, bind_core_socket
from diptych_protocol import CurveKeys
from diptych_protocol.arrays import Frame

log = logging.getLogger(__name__)

LAST_WORDS_S: Final = 2.0
POLLIN: Final = int(zmq.POLLIN)

Take = Callable[[bytes, list[bytes], list[Frame]], None]
"""A function of a client, the frames of its message, and the arrays after them."""


class WirePort:
    """Listens at one endpoint; must be created inside a running event loop."""

    def __init__(self, endpoint: str, keys: CurveKeys | None, take: Take) -> None:
        """Raises `zmq.ZMQError` when the address is taken."""
        self._take = take
        self._context = zmq.Context()
        try:
            self._socket, self._gate = bind_core_socket(self._context, endpoint, keys)
        except zmq.ZMQError:
            self._context.term()
            raise
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._loop.add_reader(self._socket.fileno(), self._drain)
        # A descriptor announces nothing before its socket was once found empty.
        self._loop.call_soon(self._drain)

    def send(self, client: bytes, frames: list[Frame]) -> bool:
        """Send a message. Returns False if the client is gone, or too far behind."""
        if self._closed:
            return False
        try:
            send_frames(self._socket, [client, *frames])
        except zmq.ZMQError as exc:
            log.info("a client is unreachable: %s", exc)
            return False
        finally:
            # The descriptor is edge-triggered, and sending may swallow an edge.
            if int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN:
                self._loop.call_soon(self._drain)
        return True

    async def close(self, clients: Iterable[bytes], last_words: list[list[Frame]]) -> None:
        """Send these clients the last words, wait until they have left, and close the socket.
        Calling it again is harmless."""
        if self._closed:
            return
        self._loop.remove_reader(self._socket.fileno())
        farewell = Farewell([self._socket])
        for client in clients:
            with contextlib.suppress(zmq.ZMQError):  # it is gone already
                for frames in last_words:
                    send_frames(self._socket, [client, *frames])
                farewell.num_told += 1
        self._closed = True  # from here on, only the farewell has the socket
        await self._loop.run_in_executor(None, self._leave, farewell)

    def _leave(self, farewell: Farewell) -> None:
        farewell.wait(LAST_WORDS_S)
        self._socket.close(linger=int(LAST_WORDS_S * 1000))
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    def _drain(self) -> None:
        """Take every message that is here."""
        while not self._closed:
            try:
                (client, *frames), arrays = receive_frames(self._socket, head=3)
            except zmq.Again:
                return
            self._take(client, frames, arrays)
