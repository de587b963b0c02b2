"""`kv_transfer_params`: the description of one hand-off between a router, a prefill engine and a
decode engine.

The names are vLLM's, so that another project's router can drive our engines; `lease_id`,
`lease_seconds`, `epoch`, `compat`, `first_token_ids`, `expires_at`, `tokens_digest` and `proof` are
ours. The prefill engine signs its values, so the router passes them on unchanged.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from diptych_protocol.errors import InvalidRequestError

Name = Annotated[str, msgspec.Meta(max_length=256)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
_LEASE_ID = re.compile("[0-9a-f]{32}")

LEASE_FIELDS = (
    "remote_engine_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "lease_id",
    "epoch",
    "compat",
    "expires_at",
    "proof",
)
"""The fields that identify a lease: its id, its engine, and the proof of both."""
ENGINE_FIELDS = ("remote_engine_id", "epoch", "remote_host", "remote_port", "compat")
"""The fields that name an engine, in announcements and in all its leases."""
PARAM = "kv_transfer_params"
EXPIRY = f"{PARAM}.expires_at"
"""The parameter that an error names if a reference has expired by the reader's clock."""
MAX_PREFIX_BLOCKS = 1 << 15
"""Limit on the blocks of a prefix that one engine fetches from another at a time."""


class KVTransferParams(msgspec.Struct, omit_defaults=True):
    """Unknown fields are ignored: other projects add their own."""

    do_remote_decode: bool = False
    """Router to prefill engine: keep the KV after prefill and answer with the fields below."""
    do_remote_prefill: bool = False
    """Prefill to decode engine (through the router): the KV of the prompt waits at the address
    below."""
    remote_engine_id: Name | None = None
    remote_request_id: Name | None = None
    remote_block_ids: list[list[BlockId]] | None = None
    """The prefill engine's block ids, one list per KV-cache group; we have one group."""
    remote_host: Name | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    remote_num_tokens: Count | None = None
    """Tokens whose KV the blocks hold."""
    tp_size: Count = 1
    """The prefill engine's number of ranks. In vLLM each rank has a hinge of its own, at the ports
    behind `remote_port`."""
    lease_id: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    """128 random bits in hexadecimal. A router that announces the request to the decode engine
    during prefill chooses them and sends them to both engines; otherwise the prefill engine
    does."""
    lease_seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] | None = None
    epoch: Name | None = None
    """Identifies one run of the prefill engine; it changes when the engine restarts at the same
    address."""
    compat: Name | None = None
    """Fingerprint of everything that must be equal for KV to be exchanged."""
    first_token_ids: list[TokenId] | None = None
    """Tokens that the prefill engine has sampled already; the decode engine continues
    after them."""
    remote_block_size: Count | None = None
    """Tokens in each of the blocks; None: as many as in the decode engine's."""
    expires_at: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] | None = None
    """Unix time, in seconds of the prefill engine's clock, after which no decode engine accepts
    this reference. The lease itself may end sooner or be renewed for longer, as the prefill engine
    decides."""
    tokens_digest: Name | None = None
    """Digest of the tokens whose KV the blocks hold, and of everything else that the KV depends
    on."""
    proof: Name | None = None
    """The prefill engine's signature of all other fields or, in an announcement, of its name and
    address."""

    @classmethod
    def parse(cls, raw: Any) -> KVTransferParams:
        """Validate a dict from outside, where null means unknown. Raises `InvalidRequestError`
        naming the field."""
        params = cls._convert(raw)
        if params.do_remote_decode and params.do_remote_prefill:
            raise bad_params("do_remote_decode and do_remote_prefill exclude each other")
        if params.do_remote_prefill:
            params._require_address()
        elif params.proof is not None:
            raise bad_params("what is signed has do_remote_prefill, and is passed on unchanged")
        lease_id = params.lease_id if params.do_remote_decode else None
        if lease_id is not None and not _LEASE_ID.fullmatch(lease_id):
            raise bad_params("a lease_id is 32 hexadecimal digits")
        return params

    @classmethod
    def naming_lease(cls, raw: Any) -> KVTransferParams:
        """Read only the fields that identify a lease from a dict from outside, so that the lease
        can be given back even if other fields are wrong. Raises `InvalidRequestError` naming the
        field."""
        params = cls._convert(
            {name: raw.get(name) for name in LEASE_FIELDS} if isinstance(raw, dict) else raw
        )
        params._require(LEASE_FIELDS)
        params._require_literal()
        return params

    @classmethod
    def _convert(cls, raw: Any) -> KVTransferParams:
        if isinstance(raw, dict):
            raw = {name: value for name, value in raw.items() if value is not None}
        try:
            return msgspec.convert(raw, cls)
        except (msgspec.ValidationError, UnicodeEncodeError) as exc:
            raise bad_params(str(exc)) from exc

    def _require_address(self) -> None:
        """An announcement has no lease that could expire."""
        self._require((*(x for x in LEASE_FIELDS if x != "expires_at"), "remote_num_tokens"))
        self._require_literal()
        if self.remote_block_ids is not None and len(self.remote_block_ids) != 1:
            raise bad_params("remote_block_ids must hold one list (one KV-cache group)")

    def require_prefix(self) -> None:
        """Raise `InvalidRequestError` unless this names an engine and how much of a prompt it has
        cached."""
        self._require((*ENGINE_FIELDS, "proof", "remote_num_tokens"))
        self._require_literal()

    def _require(self, needed: tuple[str, ...]) -> None:
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise bad_params(f"do_remote_prefill needs {', '.join(missing)}")

    def _require_literal(self) -> None:
        if self.remote_host is not None and not is_ip_literal(self.remote_host):
            raise bad_params("remote_host must be an IP address: names are not looked up")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, including defaults, for a JSON body or msgpack."""
        return msgspec.structs.asdict(self)


def bad_params(what: str) -> InvalidRequestError:
    """Return the error that says what is wrong with parameters."""
    return InvalidRequestError(f"{PARAM}: {what}", param=PARAM)


def is_ip_literal(host: str) -> bool:
    """Whether a host is an IP address, so that no name has to be looked up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def fingerprint(compat: Mapping[str, Any]) -> str:
    """Return a short digest of everything that must be equal for two engines to exchange KV."""
    canonical = msgspec.json.encode(dict(sorted(compat.items())))
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()


def differences(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], there: str = "there", here: str = "here"
) -> list[str]:
    """Return the differences of two engines' descriptions, field by field: `dtype: 'a' there, 'b'
    here`.

    A field that one of them does not have is None.
    """
    return [
        f"{name}: {theirs.get(name)!r} {there}, {ours.get(name)!r} {here}"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
