"""Admits only holders of the service's CURVE key to an engine core over the network.

All parties of one service share one key pair, mounted from a Secret. CURVE (libsodium, inside ZMQ)
encrypts and authenticates every byte; the gate below admits no client but the key's holders.
"""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from diptych_protocol import CurveKeys, InvalidRequestError

PREVIOUS = "previous-"
"""Files of the key pair that a rotation replaces, as long as engines with it may run."""


def new_keys() -> CurveKeys:
    """Return a new key pair for a service."""
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode(), secret.decode())


def read_key_ring(directory: Path) -> list[CurveKeys]:
    """Return the pairs that an engine of the service may have: the current one, then the previous
    one.

    There is a previous pair (`previous-curve-public`, `previous-curve-secret`) only during a
    rotation. Raises `InvalidRequestError` if a required file is missing or is no key.
    """
    ring = [read_keys(directory)]
    if (directory / f"{PREVIOUS}curve-public").exists():
        ring.append(read_keys(directory, PREVIOUS))
    return ring


def read_keys(directory: Path, prefix: str = "") -> CurveKeys:
    """Return the pair in the files `curve-public` and `curve-secret` of a mounted Secret."""
    names = (f"{prefix}curve-public", f"{prefix}curve-secret")
    try:
        public, secret = ((directory / name).read_text().strip() for name in names)
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequestError(f"cannot read the CURVE keys: {exc}", param="keys") from exc
    if len(public) != 40 or len(secret) != 40:
        message = f"{directory}: a CURVE key has 40 characters of Z85"
        raise InvalidRequestError(message, param="keys")
    return CurveKeys(public, secret)


class CurveGate:
    """Guards server sockets of one context: it admits only clients with the service's key."""

    def __init__(self, keys: CurveKeys) -> None:
        self._keys = keys
        self._authenticator: ThreadAuthenticator | None = None

    def guard(self, context: zmq.Context[Any], socket: zmq.Socket[Any]) -> None:
        """Make an unbound socket a CURVE server."""
        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", credentials_provider=self)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())

    def callback(self, domain: str, key: bytes) -> bool:
        """The authenticator calls this with the client's Z85 public key."""
        return hmac.compare_digest(key, self._keys.public.encode())

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


def use_keys(socket: zmq.Socket[Any], keys: CurveKeys) -> None:
    """Make an unconnected socket a CURVE client of the same service."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
