"""How a prefill engine signs a reference to a lease, and what a decode engine checks of it.

A signature has two parts. One covers the fields that identify the lease, which is enough to give it
back. The other covers every field, which is needed to read it. An announcement comes before there
is a lease: the prefill engine signs only its own name and address, which permits an early load. No
request gets the result of an early load without a complete reference.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from diptych_protocol import CurveKeys, InvalidRequestError, KVTransferParams
from diptych_protocol.kv_transfer_params import ENGINE_FIELDS, EXPIRY, PARAM

MAC_BYTES = 16


class HingeKey:
    """A secret from which message authentication codes (MACs) and other secrets are made. All
    engines of a service have it, and nobody else.

    It is derived from the service's CURVE secret. So it is available wherever that secret is, and
    changes with it. Each use has its own label, so that no signature is valid for another one.
    """

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


LEASE_FIELDS = (*ENGINE_FIELDS, "tp_size", "lease_id", "expires_at")
ALL_FIELDS = tuple(name for name in KVTransferParams.__struct_fields__ if name != "proof")
ENGINE, LEASE, REFERENCE = b"diptych engine", b"diptych lease", b"diptych refer"

MAX_SKEW_S = 60.0
"""How far, in seconds, the decode engine's clock may be ahead of the prefill engine's, whose clock
decides whether a lease is alive."""
MAX_TAKEN = 1 << 16
"""Limit on the proofs that are remembered. Beyond it the oldest is forgotten. That does no harm,
because the prefill engine refuses a lease that has ended."""


class UnprovenReferenceError(InvalidRequestError):
    """A reference was changed after signing, belongs to another request, or is no longer valid."""

    def __init__(self, why: str, param: str = PARAM) -> None:
        super().__init__(f"{param}: {why}", param=param)


@dataclass(slots=True)
class References:
    """Signs the references of one engine, and checks and remembers those of others."""

    key: HingeKey
    clock: Callable[[], float] = time.time
    """Unix time in seconds."""
    _taken: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """The proof of each reference that has come -> Unix time after which it is worthless."""

    # --- P ------------------------------------------------------------------------------------

    def proof_of_engine(self, params: KVTransferParams) -> str:
        """Return the proof for announcements of an engine."""
        return self._mac(ENGINE, params, ENGINE_FIELDS)

    def sign(self, params: KVTransferParams, seconds: float) -> KVTransferParams:
        """Return the same parameters, valid for `seconds` from now, with a proof of all of them."""
        params = msgspec.structs.replace(params, expires_at=math.ceil(self.clock() + seconds))
        proof = self._mac(LEASE, params, LEASE_FIELDS) + self._mac(REFERENCE, params, ALL_FIELDS)
        return msgspec.structs.replace(params, proof=proof)

    # --- D ------------------------------------------------------------------------------------

    def check_engine(self, params: KVTransferParams) -> None:
        """Raise `UnprovenReferenceError` unless an engine of this service signed this."""
        self._check(params.proof or "", self._mac(ENGINE, params, ENGINE_FIELDS))

    def check_lease(self, params: KVTransferParams) -> None:
        """Raise `UnprovenReferenceError` unless an engine of this service made such a lease."""
        named = (params.proof or "")[: 2 * MAC_BYTES]
        self._check(named, self._mac(LEASE, params, LEASE_FIELDS))

    def check(self, params: KVTransferParams) -> None:
        """Raise `UnprovenReferenceError` if any field differs from what was signed."""
        self.check_lease(params)
        self._check((params.proof or "")[2 * MAC_BYTES :], self._mac(REFERENCE, params, ALL_FIELDS))

    def check_use(self, params: KVTransferParams, digest: str) -> None:
        """Raise as `check` does, and also if the reference is for tokens of another digest, has
        expired or was taken before.

        Nothing in a reference is trusted before: nobody connects to its address.
        """
        self.check(params)
        if not equal((params.tokens_digest or "").encode(), digest.encode()):
            raise UnprovenReferenceError(
                "the lease is for another prompt, adapter or salt, or of other weights"
            )
        if self.clock() > (params.expires_at or 0) + MAX_SKEW_S:
            raise UnprovenReferenceError(
                "the reference has expired; prefill again, and have the engines' clocks agree",
                EXPIRY,
            )
        if self.is_taken(params):
            raise UnprovenReferenceError("the reference was used here before; prefill again")

    def take(self, params: KVTransferParams) -> None:
        """Record that a reference has come, so that no other request may use it."""
        now = self.clock()
        self._taken[params.proof or ""] = (params.expires_at or 0) + MAX_SKEW_S
        while len(self._taken) > MAX_TAKEN or next(iter(self._taken.values())) < now:
            self._taken.popitem(last=False)
            if not self._taken:
                return

    def is_taken(self, params: KVTransferParams) -> bool:
        """Whether a request has come with this reference to this engine."""
        return params.proof in self._taken

    def _mac(self, label: bytes, params: KVTransferParams, names: tuple[str, ...]) -> str:
        values: list[Any] = [getattr(params, name) for name in names]
        return self.key.mac(label, msgspec.msgpack.encode(values)).hex()

    def _check(self, proof: str, expected: str) -> None:
        if not equal(proof.encode(), expected.encode()):
            raise UnprovenReferenceError(
                "no engine of this service has signed this; pass on unchanged what prefill said"
            )
