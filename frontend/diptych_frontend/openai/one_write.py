"""The head of an answer goes out together with the beginning of its body.

uvicorn writes the two one after the other, and uvloop hands each write to the system at once. That
is twice the way through the network stack, and a client that wakes up for half an answer: a third
of what a short request costs.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_CONTINUE = b"HTTP/1.1 100 "
"""So begins what is no head of an answer: the client waits for it before it sends its body."""


class HeadKept:
    """The transport of one answer: keeps its head back until the body begins, or for one round of
    the event loop. What follows goes straight to the connection's transport."""

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        """Put itself in the place of the cycle's transport."""
        self._cycle = cycle
        self._loop = loop
        self._transport = cycle.transport
        self._head = b""
        cycle.transport = self  # type: ignore[assignment]

    def write(self, data: bytes) -> None:
        if self._head or data.startswith(_CONTINUE):
            self._flush(data)
        else:
            self._head = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self, data: bytes = b"") -> None:
        if self._head:
            self._cycle.transport = self._transport
        written, self._head = self._head + data, b""
        if written:
            self._transport.write(written)
