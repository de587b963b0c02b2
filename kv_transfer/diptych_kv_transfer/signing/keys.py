"""The hinge's key, which all engines of a service have, and nobody else.

It is derived from the service's CURVE secret, so that it is where that is, and changes when that
does. A use of it has a label, so that what is signed for one use proves nothing in another.
"""

from __future__ import annotations

import hashlib
import hmac

from diptych_protocol import CurveKeys

MAC_BYTES = 16


class HingeKey:
    """A secret that macs are made with, and other secrets."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        """`secret` is 32 bytes that cannot be guessed."""
        self._secret = secret

    @classmethod
    def of(cls, keys: CurveKeys) -> HingeKey:
        """The key of the service that has these keys."""
        return HingeKey(
            hashlib.blake2b(keys.secret.encode(), person=b"diptych hinge 1").digest()[:32]
        )

    def mac(self, label: bytes, content: bytes) -> bytes:
        """What only holders of the key can make of a content: `MAC_BYTES`. A label has at most 16
        bytes."""
        return hashlib.blake2b(
            content, key=self._secret, person=label, digest_size=MAC_BYTES
        ).digest()

    def derive(self, label: bytes, content: bytes) -> HingeKey:
        """Another key, which tells nothing of this one."""
        return HingeKey(
            hashlib.blake2b(content, key=self._secret, person=label, digest_size=32).digest()
        )


PUBLIC_KEY = HingeKey(b"diptych: this key is no secret. ")
"""Of engines that have no keys, and listen on loopback only."""

equal = hmac.compare_digest
"""Compares macs in constant time."""
