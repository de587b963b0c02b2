"""The handshake by which two hinges prove to each other that they belong to one service.

    client                             server
    nonce          ───────────────▶
                   ◀───────────────    nonce, mac of both     I have the key
    mac of both    ───────────────▶                           so have I
    Hello, …       ◀──────────────▶    Hello, …               each with a mac

The client reveals only a nonce to an unknown server. The server answers with a mac that looks like
noise to anybody without the key. After that each record has a mac of its direction, its number, its
kind and its content, under a key of this connection. So a record that was edited, repeated, left
out, reordered or recorded elsewhere is detected. The caller passes the nonce.
"""

from __future__ import annotations

from diptych_kv_transfer.signing.references import MAC_BYTES, HingeKey, equal

NONCE_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + MAC_BYTES
ACCEPTED, CONNECTED = b"diptych accept 1", b"diptych connect1"
TO_ACCEPTED, TO_CONNECTED = b"diptych there 1", b"diptych back 1"
RECORD = b"diptych record 1"


class AuthenticationError(Exception):
    """The other side does not have the key, or somebody has changed its data."""


class Session:
    """Seals and opens the records of a connection after the handshake."""

    def __init__(self, sends: HingeKey, receives: HingeKey) -> None:
        """`sends` and `receives` are the keys of the two directions."""
        self._sends, self._receives = sends, receives
        self._sent = self._received = 0

    def seal(self, kind: int, data: bytes) -> bytes:
        """Return the next record to send: the content and its mac."""
        self._sent += 1
        return data + _mac(self._sends, self._sent, kind, data)

    def open(self, kind: int, record: bytes) -> bytes:
        """Return the content of the next received record. Raises `AuthenticationError`."""
        self._received += 1
        data = record[:-MAC_BYTES]
        if not equal(record[-MAC_BYTES:], _mac(self._receives, self._received, kind, data)):
            raise AuthenticationError("a record is not what the other side sent")
        return data


class Handshake:
    """One side of a handshake."""

    def __init__(self, key: HingeKey, nonce: bytes, *, connects: bool) -> None:
        """`nonce` is `NONCE_BYTES` unpredictable bytes that are used only once."""
        self._key, self._nonce, self._connects = key, nonce, connects
        self._nonces = b""
        """Both: of who connects, then of who is connected to."""
        self.opening = nonce if connects else b""
        """What is said unasked, if anything."""
        self.session: Session | None = None
        """Set once the peer has proven itself."""

    def receive(self, data: bytes) -> bytes:
        """Return the answer, if any, to a received record. Raises `AuthenticationError`."""
        if self.session is not None:
            raise AuthenticationError("it has proven itself already")
        if self._connects:
            return self._receive_answer(data)
        if not self._nonces:
            return self._receive_nonce(data)
        self._require(data, CONNECTED)
        self.session = self._begin(sends=TO_CONNECTED, receives=TO_ACCEPTED)
        return b""

    def _receive_nonce(self, data: bytes) -> bytes:
        if len(data) != NONCE_BYTES:
            raise AuthenticationError("it begins with something else than a nonce")
        self._nonces = data + self._nonce
        return self._nonce + self._key.mac(ACCEPTED, self._nonces)

    def _receive_answer(self, data: bytes) -> bytes:
        if len(data) != ANSWER_BYTES:
            raise AuthenticationError("it answers with something else than a nonce and a mac")
        self._nonces = self._nonce + data[:NONCE_BYTES]
        self._require(data[NONCE_BYTES:], ACCEPTED)
        self.session = self._begin(sends=TO_ACCEPTED, receives=TO_CONNECTED)
        return self._key.mac(CONNECTED, self._nonces)

    def _require(self, mac: bytes, label: bytes) -> None:
        if not equal(mac, self._key.mac(label, self._nonces)):
            raise AuthenticationError("it does not have the key of this service")

    def _begin(self, *, sends: bytes, receives: bytes) -> Session:
        return Session(
            self._key.derive(sends, self._nonces), self._key.derive(receives, self._nonces)
        )


def _mac(key: HingeKey, number: int, kind: int, data: bytes) -> bytes:
    return key.mac(RECORD, number.to_bytes(8, "little") + bytes([kind]) + data)
