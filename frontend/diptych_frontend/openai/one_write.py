"""Sends the head of an answer together with the beginning of its body.

uvicorn writes the two separately, and uvloop passes each write to the system at once. That takes
two ways through the network stack and wakes the client for half an answer, which is a third of the
cost of a short request.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_CONTINUE = b"HTTP/1.1 100 "
"""So begins what is no head of an answer: the client waits for it before it sends its body."""


class HeadKept:
    """The transport of one answer. It keeps the head until the body begins, or for one round of the
    event loop. Later data go directly to the connection's transport."""

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        """Replace the transport of the request cycle."""
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
