"""The hinge's key, which all engines of a service have, and nobody else.

It is derived from the service's CURVE secret. So it is available wherever that secret is, and
changes with it. Each use has its own label, so that no signature is valid for another one.
"""

from __future__ import annotations

import hashlib
import hmac

from diptych_protocol import CurveKeys

MAC_BYTES = 16


class HingeKey:
    """A secret from which message authentication codes (MACs) and other secrets are made."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        """`secret` is 32 unpredictable bytes."""
        self._secret = secret

    @classmethod
    def of(cls, keys: CurveKeys) -> HingeKey:
        """Derive the key from a service's keys."""
        return HingeKey(
            hashlib.blake2b(keys.secret.encode(), person=b"diptych hinge 1").digest()[:32]
        )

    def mac(self, label: bytes, content: bytes) -> bytes:
        """Return the MAC of some content, `MAC_BYTES` long, which only holders of the key can
        compute. A label has at most 16 bytes."""
        return hashlib.blake2b(
            content, key=self._secret, person=label, digest_size=MAC_BYTES
        ).digest()

    def derive(self, label: bytes, content: bytes) -> HingeKey:
        """Derive another key, which reveals nothing about this one."""
        return HingeKey(
            hashlib.blake2b(content, key=self._secret, person=label, digest_size=32).digest()
        )


PUBLIC_KEY = HingeKey(b"diptych: this key is no secret. ")
"""The key of engines without keys of their own, which listen on loopback only."""

equal = hmac.compare_digest
"""Compare macs in constant time."""
