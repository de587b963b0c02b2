"""What a decode engine (D) and a prefill engine (P) say to each other about a lease.

    D                                     P
    Hello  ─────────────────────────────▶      who I am, and what KV I understand
           ◀─────────────────────────────  Hello
    Open   ─────────────────────────────▶      claim the lease, name the runs of blocks I lack
           ◀────────────── Opened / Refused
           ◀═════════════════════ blocks       tagged messages straight into D's blocks
    Close  ─────────────────────────────▶
           ◀──────────────────────── Closed    held=True: what you read was valid throughout
    Renew, Reject ──────────────────────▶      keep these leases / end this one, no answer

Every message may be repeated without harm. Fields are only ever added at the end, with a default.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20

Name = Annotated[str, msgspec.Meta(max_length=256)]
LeaseId = Name
TAG_BITS = 56
Tag = Annotated[int, msgspec.Meta(ge=0, lt=1 << TAG_BITS)]
"""On the transport it is multiplied by the number of P's ranks: each sends its part of a run."""
Run = tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=1)]]
"""(first block of the lease, number of blocks); contiguous in P's memory and in D's."""


class RemoteProtocolError(Exception):
    """The peer broke the protocol; its connection is closed."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    engine_id: Name
    epoch: Name
    compat: dict[Name, int | Name]
    """Everything that must be equal to exchange KV, by name."""
    version: int = VERSION


class Open(Message, frozen=True):
    lease_id: LeaseId
    digest: Name
    """Of the tokens whose KV the reader expects; another prompt's lease is refused."""
    tag: Tag
    """Tag of the first run; the others follow, one up each."""
    runs: list[Run]


class Close(Message, frozen=True):
    lease_id: LeaseId
    ok: bool


class Renew(Message, frozen=True):
    lease_ids: list[LeaseId]


class Reject(Message, frozen=True):
    lease_id: LeaseId


class Opened(Message, frozen=True):
    lease_id: LeaseId


class Refused(Message, frozen=True):
    lease_id: LeaseId
    reason: str


class Closed(Message, frozen=True):
    lease_id: LeaseId
    held: bool
    """The claim was held from Open to Close: only then may the reader use what it read."""


FromReader = Open | Close | Renew | Reject
FromOwner = Opened | Refused | Closed
AnyMessage = Hello | FromReader | FromOwner

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Parse a peer's bytes. Raises `RemoteProtocolError`, and nothing else, for garbage."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message of {len(data)} bytes")
    try:
        message: AnyMessage = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RemoteProtocolError(str(exc)) from exc
    return message
