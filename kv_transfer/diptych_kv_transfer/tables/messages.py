"""The messages that a decode engine (D) and a prefill engine (P) exchange about a lease.

    D                                     P
    Hello  ─────────────────────────────▶      who I am, and what KV I understand
           ◀─────────────────────────────  Hello
    Open   ─────────────────────────────▶      claim the lease, name the runs of blocks I lack
           ◀────────────── Opened / Refused
           ◀───────────────────── Sending      these are ready: post your receives
           ◀═════════════════════ blocks       tagged messages straight into D's blocks
               … again, while P computes …
    Close  ─────────────────────────────▶
           ◀──────────────────────── Closed    held=True: what you read was valid throughout
    Renew, Reject ──────────────────────▶      keep these leases / end this one, no answer

Any engine may ask any other for a prefix in the same way: its Open has a new id and the names of
the prefix's blocks. The owner makes a lease of those of them that it remembers, and says in Opened
how many these are.

If several ranks of a decode engine read the blocks of one rank of a prefill engine, each opens its
share of the lease, by the share's own name (`shares.py`).

A claim is identified by its lease and its tag, so that late messages about an earlier claim are
recognised. Every message may be repeated without harm. When a claim is lost, the prefill engine
sends Closed unasked. Fields are only ever added at the end, with a default.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from diptych_protocol import UNREADABLE
from diptych_protocol.kv_transfer_params import MAX_PREFIX_BLOCKS, Name

VERSION = 2
MAX_MESSAGE_BYTES = 1 << 20

LeaseId = Name
Tag = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Run = tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=1)]]
"""(first block of the lease, number of blocks)"""
BlockName = Annotated[bytes, msgspec.Meta(max_length=64)]
"""The chained hash of a block. It names all tokens up to the block's end and everything else that
their KV depends on: see `diptych_protocol.block_hashes`."""


class RemoteProtocolError(Exception):
    """The peer broke the protocol; its connection is closed."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all messages."""


class Hello(Message, frozen=True):
    engine_id: Name
    epoch: Name
    compat: dict[Name, int | Name]
    """Everything that must be equal in engines that exchange KV, by name."""
    version: int = VERSION
    geometry: dict[Name, int] = {}
    """What may differ, because blocks can be repacked: see `layout.GEOMETRY`."""
    former: list[Name] | None = None
    """Epochs of engines that ran here before, whose open leases this one goes on with. None: leases
    end with their engine."""


class Open(Message, frozen=True):
    lease_id: LeaseId
    digest: Name
    """Digest of the tokens whose KV the reader expects; a lease for another prompt is refused. Of
    a prefix, the name of the reader's weights."""
    tag: Tag
    """Names the claim. It is the tag of the first run; each further run has the next higher tag."""
    runs: list[Run]
    """The blocks that the reader lacks, in runs that are contiguous there and disjoint."""
    early: bool = False
    """The prefill engine does not refuse an unknown lease, but answers when it knows the lease."""
    names: Annotated[list[BlockName], msgspec.Meta(max_length=MAX_PREFIX_BLOCKS)] = []
    """Not empty: no such lease exists yet. Make one of these blocks, from the first one on, as far
    as they are remembered. The runs are among them. An engine that does not know this field refuses
    the lease as unknown."""


class Close(Message, frozen=True):
    lease_id: LeaseId
    ok: bool
    """True: all requested blocks have arrived, and the lease may end if it was held. False: the
    reader gives up its claim, and others may open the lease."""
    tag: Tag = 0


class Renew(Message, frozen=True):
    lease_ids: list[LeaseId]


class Reject(Message, frozen=True):
    lease_id: LeaseId


class Opened(Message, frozen=True):
    lease_id: LeaseId
    tag: Tag = 0
    num_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The number of blocks in the lease of a prefix; the reader gets no others of its runs."""


class Refused(Message, frozen=True):
    lease_id: LeaseId
    reason: str
    tag: Tag = 0


class Sending(Message, frozen=True):
    lease_id: LeaseId
    tag: Tag
    """The tag of the claim."""
    first: Tag
    """The first run travels under this tag; each further run travels under the next higher tag."""
    runs: Annotated[list[Run], msgspec.Meta(min_length=1)]
    """Parts of the requested runs, each contiguous in the memory of both engines."""


class Closed(Message, frozen=True):
    lease_id: LeaseId
    held: bool
    """The claim was held from Open to Close. Only then may the reader use the blocks."""
    tag: Tag = 0


FromReader = Open | Close | Renew | Reject
FromOwner = Opened | Refused | Sending | Closed
AnyMessage = Hello | FromReader | FromOwner

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Parse a peer's bytes. Raises `RemoteProtocolError`, and nothing else, for garbage."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message of {len(data)} bytes")
    try:
        message: AnyMessage = _decoder.decode(data)
    except UNREADABLE as exc:
        raise RemoteProtocolError(str(exc)) from exc
    return message
