"""Messages over the UCX stream of one endpoint. Before each are its length and kind, in four bytes.

First come the records of the handshake only; then come messages and frames only, each with its mac.
"""

from __future__ import annotations

from diptych_kv_transfer.signing.handshake import ANSWER_BYTES, Session
from diptych_kv_transfer.signing.references import MAC_BYTES
from diptych_kv_transfer.tables.messages import MAX_MESSAGE_BYTES
from diptych_kv_transfer.transports.ucx import frames
from diptych_kv_transfer.transports.ucx.libucp import UcpError
from diptych_kv_transfer.transports.ucx.requests import StreamReceive, StreamSend
from diptych_kv_transfer.transports.ucx.worker import Endpoint

HEADER_BYTES = 4
"""Three bytes of length and one of kind."""
MESSAGE, FRAME, HANDSHAKE = 0, 1, 2
MAX_BYTES = {MESSAGE: MAX_MESSAGE_BYTES + MAC_BYTES, FRAME: frames.MAX_FRAME_BYTES + MAC_BYTES}


class StreamError(Exception):
    """The stream has ended, or its data are no valid message."""


class Stream:
    """The stream of one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Post a receive on the endpoint."""
        self._endpoint = endpoint
        self._sends: list[StreamSend] = []
        """The sends in flight."""
        self._pending = b""
        self._kind: int | None = None
        """The kind of the message whose content is being received; None while a header, with the
        length and the kind, is being received."""
        self.session: Session | None = None
        """None: the other side has not proven itself."""
        self._receive(HEADER_BYTES)

    def send(self, kind: int, data: bytes) -> None:
        """Send a message with the next `flush`. Raises `StreamError` before there is a session."""
        if self.session is None:
            raise StreamError("nothing is said to who has not proven itself")
        self._append(kind, self.session.seal(kind, data))

    def shake(self, data: bytes) -> None:
        """Send a record of the handshake with the next `flush`."""
        self._append(HANDSHAKE, data)

    def _append(self, kind: int, data: bytes) -> None:
        header = len(data) | kind << 24
        self._pending += header.to_bytes(HEADER_BYTES, "little") + data

    @property
    def pending(self) -> bool:
        """Whether there is something to flush."""
        return bool(self._pending)

    def flush(self) -> None:
        """Send everything that is pending in one send. Raises `StreamError`."""
        self._sends = [send for send in self._sends if not send.ended]
        if not self._pending:
            return
        try:
            # One send for all, because each wakes the other side, which then takes our core.
            self._sends.append(StreamSend(self._endpoint.handle, self._pending))
        except UcpError as exc:
            raise StreamError(str(exc)) from exc
        self._pending = b""

    def next_message(self) -> tuple[int, bytes] | None:
        """Return the kind and content of a message that has arrived; None if there is none.

        Raises `StreamError`, and `AuthenticationError` for data that the other side did not send.
        """
        while self._receiving.ended:
            data = self._receiving.result()
            if data is None:
                raise StreamError("the stream has ended")
            if self._kind is not None:
                kind, self._kind = self._kind, None
                self._receive(HEADER_BYTES)
                return kind, data if self.session is None else self.session.open(kind, data)
            header = int.from_bytes(data, "little")
            kind, length = header >> 24, header & 0xFFFFFF
            if not 0 < length <= self._max_bytes(kind):
                raise StreamError(f"a message of kind {kind} and {length} bytes is announced")
            self._kind = kind
            self._receive(length)
        return None

    @property
    def ended(self) -> bool:
        """Whether UCX has let go of our buffers, soon after the endpoint was closed."""
        self._sends = [send for send in self._sends if not send.ended]
        return self._receiving.ended and not self._sends

    def _max_bytes(self, kind: int) -> int:
        if self.session is None:
            return ANSWER_BYTES if kind == HANDSHAKE else 0
        return MAX_BYTES.get(kind, 0)

    def _receive(self, num_bytes: int) -> None:
        self._receiving = StreamReceive(self._endpoint.handle, num_bytes)
