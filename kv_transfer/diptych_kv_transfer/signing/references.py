"""What P signs of what it lends, and what D makes sure of before it believes any of it.

A signature has two parts: of what names the lease, which is enough to give it back, and of every
field, which is what it takes to read it. An announcement comes before there is a lease: it has P's
signature of its name and address alone, and brings nothing but an early load, which no request gets
without a whole reference. Pure, but for the clock.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from diptych_kv_transfer.signing.keys import MAC_BYTES, HingeKey, equal
from diptych_protocol import InvalidRequestError, KVTransferParams
from diptych_protocol.kv_transfer_params import PARAM

ENGINE_FIELDS = ("remote_engine_id", "epoch", "remote_host", "remote_port", "compat")
LEASE_FIELDS = (*ENGINE_FIELDS, "lease_id", "expires_at")
ALL_FIELDS = tuple(name for name in KVTransferParams.__struct_fields__ if name != "proof")
ENGINE, LEASE, REFERENCE = b"diptych engine", b"diptych lease", b"diptych refer"

MAX_SKEW_S = 60.0
"""How much later than P's the clock of D may be. Whether a lease lives is for P's clock to say."""
MAX_TAKEN = 1 << 16
"""Beyond, the oldest is forgotten: P refuses a lease that has ended."""


class UnprovenReferenceError(InvalidRequestError):
    """A reference is not what P signed, or not for this request, or not any more."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{PARAM}: {why}", param=PARAM)


@dataclass(slots=True)
class References:
    """Of one engine: what it signs, and what it has taken of others."""

    key: HingeKey
    clock: Callable[[], float] = time.time
    """Unix time in seconds."""
    _taken: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Proofs of references that a request came with, and when they are worth nothing any more."""

    # --- P ------------------------------------------------------------------------------------

    def proof_of_engine(self, params: KVTransferParams) -> str:
        """The proof for announcements of an engine."""
        return self._mac(ENGINE, params, ENGINE_FIELDS)

    def sign(self, params: KVTransferParams, seconds: float) -> KVTransferParams:
        """The same, good for so long, and with a proof of it all."""
        params = msgspec.structs.replace(params, expires_at=math.ceil(self.clock() + seconds))
        proof = self._mac(LEASE, params, LEASE_FIELDS) + self._mac(REFERENCE, params, ALL_FIELDS)
        return msgspec.structs.replace(params, proof=proof)

    # --- D ------------------------------------------------------------------------------------

    def check_engine(self, params: KVTransferParams) -> None:
        """Raises `UnprovenReferenceError` unless an engine of the service said that it is there."""
        self._check(params.proof or "", self._mac(ENGINE, params, ENGINE_FIELDS))

    def check_lease(self, params: KVTransferParams) -> None:
        """Raises `UnprovenReferenceError` unless an engine of this service made such a lease."""
        named = (params.proof or "")[: 2 * MAC_BYTES]
        self._check(named, self._mac(LEASE, params, LEASE_FIELDS))

    def check(self, params: KVTransferParams) -> None:
        """Raises `UnprovenReferenceError` if any field is not as it was signed."""
        self.check_lease(params)
        self._check((params.proof or "")[2 * MAC_BYTES :], self._mac(REFERENCE, params, ALL_FIELDS))

    def check_use(self, params: KVTransferParams, digest: str) -> None:
        """Likewise, and if it is not for tokens with this digest, or too late, or was taken.

        Before that, nothing of it is believed: neither is its address connected to.
        """
        self.check(params)
        if not equal((params.tokens_digest or "").encode(), digest.encode()):
            raise UnprovenReferenceError("the lease is for another prompt, adapter or salt")
        if self.clock() > (params.expires_at or 0) + MAX_SKEW_S:
            raise UnprovenReferenceError(
                "the reference has expired; prefill again, and have the engines' clocks agree"
            )
        if self.is_taken(params):
            raise UnprovenReferenceError("the reference was used here before; prefill again")

    def take(self, params: KVTransferParams) -> None:
        """A request has come with it: it serves no other."""
        now = self.clock()
        self._taken[params.proof or ""] = (params.expires_at or 0) + MAX_SKEW_S
        while len(self._taken) > MAX_TAKEN or next(iter(self._taken.values())) < now:
            self._taken.popitem(last=False)
            if not self._taken:
                return

    def is_taken(self, params: KVTransferParams) -> bool:
        """A request has come with it here."""
        return params.proof in self._taken

    def _mac(self, label: bytes, params: KVTransferParams, names: tuple[str, ...]) -> str:
        values: list[Any] = [getattr(params, name) for name in names]
        return self.key.mac(label, msgspec.msgpack.encode(values)).hex()

    def _check(self, proof: str, expected: str) -> None:
        if not equal(proof.encode(), expected.encode()):
            raise UnprovenReferenceError(
                "no engine of this service has signed this; pass on unchanged what prefill said"
            )
