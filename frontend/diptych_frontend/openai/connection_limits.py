"""Limits what a connection may cost before its client is known.

This is uvicorn's protocol with limits on: bytes and number of headers, the time until they arrive,
requests sent ahead, connections in total and per address, and the time until written data is read.
A sweep over all connections once a second checks the times, so no request needs a timer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
from collections import deque
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from diptych_frontend.openai.errors import OPENAI, error_answer
from diptych_frontend.openai.exchange import PARTS_KEY, WRITE_TIMEOUT_S, PartWriter
from diptych_protocol import EngineOverloadedError, InvalidRequestError

logger = logging.getLogger(__name__)

_CONTINUE = b"HTTP/1.1 100 "
"""So begins what is no head of an answer: the client waits for it before it sends its body."""
_CODING = b"transfer-encoding"
MAX_HEADERS: Final = 128
MAX_HEAD_BYTES: Final = 64 << 10
"""Limit, in bytes, of a request line with its headers."""
HEAD_TIMEOUT_S: Final = 15.0
"""Time from the opening of the connection, or from the first byte of a later request, to the end of
the headers."""
MAX_PIPELINED: Final = 8
"""The number of requests that may be sent before the answer to the first."""
MAX_CONNECTIONS: Final = 8192
MAX_DESCRIPTORS: Final = 65536


class HeadKept:
    """The transport of one answer. It keeps the head until the body begins, or for one round of the
    event loop. Later data go directly to the connection's transport."""

    # uvicorn writes head and body separately, and uvloop passes each write to the system at once.
    # That takes two ways through the network stack and wakes the client for half an answer, which
    # is a third of the cost of a short request.

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


def raise_descriptor_limit() -> int:
    """Raise the limit on file descriptors as far as the system permits, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


class Connections:
    """The connections of this process, by the address of the client.

    When there are too many, idle connections are closed: the oldest ones of the address that has
    the most. One address may have half of all connections, which is enough even for a load
    balancer.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[str, dict[LimitedProtocol, None]] = {}
        """The connections of each address, in the order in which they came."""

    @classmethod
    def of_this_process(cls) -> Connections:
        """Return limits for this process: half of the descriptors are left for engines, files and
        resolvers."""
        return cls(min(MAX_CONNECTIONS, raise_descriptor_limit() // 2))

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def enter(self, address: str, connection: LimitedProtocol) -> bool:
        """Whether there is room for one more connection."""
        crowd = None
        if len(self._open.get(address, ())) >= max(1, self._most // 2):
            crowd = address
        elif len(self) >= self._most:
            crowd = max(self._open, key=lambda each: len(self._open[each]))
        if crowd is not None and not self._make_room(crowd):
            return False
        self._open.setdefault(address, {})[connection] = None
        return True

    def leave(self, address: str, connection: LimitedProtocol) -> None:
        of_address = self._open.get(address, {})
        of_address.pop(connection, None)
        if not of_address:
            self._open.pop(address, None)

    def _make_room(self, address: str) -> bool:
        """Close idle connections, several at a time: to look for one takes as long as to look for
        all of them. False if there are none."""
        idle = [connection for connection in self._open[address] if connection.is_idle]
        for connection in idle[: max(1, self._most // 16)]:
            connection.transport.abort()
            self.leave(address, connection)
        return bool(idle)


class LimitedProtocol(HttpToolsProtocol):
    """One connection with limits."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        """`options` are uvicorn's."""
        super().__init__(**options)
        self._connections = connections
        self._address = ""
        self._in_head = False
        """A request has begun whose headers are not complete."""
        self._received = 0
        """Bytes received since the request began, counted while its headers are not complete."""
        self._head_bytes = 0
        """Bytes of the request's headers that are complete."""
        self._head_since = math.inf
        """When the wait for the next headers began, by the event loop's clock; infinity while none
        are awaited."""
        self._unanswered: list[RequestResponseCycle] = []
        self._last_words = b""
        """The answer to what is no request, after which nothing is read."""
        self._fault: InvalidRequestError | None = None
        """Why the parser was stopped."""
        self._unread = 0
        self._unread_since = 0.0
        """Time, by the event loop's clock, since which the client has read none of the `_unread`
        bytes that wait for it."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._head_since = self.loop.time()
        if not self._connections.enter(self._address, self):
            self._refuse(EngineOverloadedError("too many connections are open; retry later"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self._address, self)
        super().connection_lost(exc)
        for cycle in self._unanswered:  # uvicorn tells the last one only
            cycle.disconnected = True
            cycle.message_event.set()
            cycle.scope[PARTS_KEY].lost()  # type: ignore[typeddict-item]

    def data_received(self, data: bytes) -> None:
        # As uvicorn, but a stranger's nonsense is no warning, of which he could write any number.
        self._unset_keepalive_if_required()
        if self._last_words:
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            self._go_on_without_upgrade(data[exc.args[0] :])
            return
        except httptools.HttpParserError as exc:
            logger.debug("%s sent no HTTP: %s", self._address, exc)
            self.send_400_response(str(exc))
        if self._in_head and not self.transport.is_closing():
            # What is not complete was not seen by `on_header`.
            self._received += len(data)
            if self._received > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Read a request that asks for another protocol as if it did not: none is spoken here.

        The parser takes all that follows for the other protocol, the request's body too. So another
        parser gets the request, without the wish, and `rest`.
        """
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                lines.append(
                    b"connection: " + (b"close" if b"close" in value.lower() else b"keep-alive")
                )
            elif name != b"upgrade":
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.data_received(b"\r\n".join((*lines, b"", rest)))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._received, self._head_bytes = True, 0, 0
        self._head_since = min(self._head_since, self.loop.time())

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._fault = _head_too_large()
            raise self._fault  # makes the parser stop, and uvicorn call `send_400_response`
        if len(name) == len(_CODING) and name.lower() == _CODING and value.lower() != b"chunked":
            # The parser would pass on what is compressed as if it were the body.
            self._fault = InvalidRequestError(
                "of the transfer codings there is only 'chunked' here", status=501
            )
            raise self._fault

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            self._fault = InvalidRequestError("this is no proxy", status=405)
            raise self._fault
        if self.parser.should_upgrade():
            return  # it is read again
        self._in_head, self._head_since = False, math.inf
        if self.parser.get_http_version() == "1.1" and b"host" not in dict(self.headers):
            self._fault = InvalidRequestError("the header Host is missing", param="Host")
            raise self._fault
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fault = InvalidRequestError(
                f"more than {MAX_PIPELINED} requests were sent ahead; wait for their answers"
            )
            raise self._fault
        super().on_headers_complete()
        HeadKept(self.cycle, self.loop)
        has_chunks = self.parser.get_http_version() != "1.0"
        if not has_chunks:
            _end_with_connection(self.cycle)
        parts = PartWriter(self.transport, self.flow, has_chunks=has_chunks)
        self.scope[PARTS_KEY] = parts  # type: ignore[typeddict-unknown-key]
        self._unanswered = [each for each in self._unanswered if not each.response_complete]
        self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if len(self.url or b"") >= MAX_HEAD_BYTES:  # uvicorn cannot read it
            self._fault = _head_too_large()
        self._refuse(self._fault or InvalidRequestError(f"this is not HTTP: {msg}"))

    def _refuse(self, exc: InvalidRequestError | EngineOverloadedError) -> None:
        """Answer in OpenAI's form, after the requests that were whole, and close."""
        broken = self.cycle if self.cycle is not None and self.cycle.more_body else None
        if broken is not None and not broken.response_complete:
            if broken.response_started:
                self.transport.abort()
                return
            broken.disconnected = True  # it writes nothing any more
            self.pipeline = deque(each for each in self.pipeline if each[0] is not broken)
        answer = error_answer(exc, "")
        body = OPENAI.body(answer, "")
        headers = (
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *answer.headers,
        )
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        self._last_words = b"".join((STATUS_LINE[answer.status], *lines, b"\r\n", body))
        self._end_if_answered()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._end_if_answered()

    def _end_if_answered(self) -> None:
        answered = all(x.response_complete or x.disconnected for x in self._unanswered)
        if self._last_words and answered and not self.transport.is_closing():
            self.transport.write(self._last_words)
            self.transport.close()

    def sweep(self, now: float) -> None:
        """Close the connection if its client is too slow. Called about once a second."""
        late = self.is_idle and now - self._head_since > HEAD_TIMEOUT_S
        if late and not self.transport.is_closing():
            if self._in_head:
                message = f"the headers did not arrive within {HEAD_TIMEOUT_S:g} s"
                self._refuse(InvalidRequestError(message, status=408, code="headers_too_late"))
            else:
                self.transport.close()
        unread = self.transport.get_write_buffer_size()
        if not unread or not (self.flow.write_paused or self.transport.is_closing()):
            self._unread = 0
        elif unread < self._unread or not self._unread:
            self._unread, self._unread_since = unread, now
        elif now - self._unread_since > WRITE_TIMEOUT_S:
            # What was written will never be read: to close would be to wait for that.
            self.transport.abort()


def _end_with_connection(cycle: RequestResponseCycle) -> None:
    """Have uvicorn write an answer as it is: HTTP/1.0 knows no chunks, and then no keep-alive."""
    send, cycle.chunked_encoding = cycle.send, False

    async def unchunked(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = unchunked  # type: ignore[method-assign]


def _head_too_large() -> InvalidRequestError:
    return InvalidRequestError(
        f"a request may have {MAX_HEADERS} headers, of {MAX_HEAD_BYTES} bytes together",
        status=431,
        code="headers_too_large",
    )
