"""The frames that two transports exchange about blocks, beside the messages that they carry.

    sender                     receiver
    Introduction ────────────▶          how processes of my host may read my memory (once)
    Offer        ────────────▶          where the runs are in my memory

                 ◀─────────── Moved     on one host: I have read them
                 ◀─────────── Send      elsewhere: send them, under these tags; I wait for them
                                        (or Moved, not ok: they are not what I asked for)

After Send there is no Moved, because the arrival of the bytes is enough. Only the side that was
connected to introduces itself, because it is the prefill engine. Its introduction is valid on its
own host only.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from diptych_kv_transfer.tables.messages import Tag

MAX_FRAME_BYTES = 8 << 20
"""Limit, in bytes, of a frame: enough for a million tokens in scattered blocks of 16."""

Address = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Length = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Span = tuple[Address, Length]
"""A range of bytes in one process's memory."""
Packed = Annotated[bytes, msgspec.Meta(min_length=1, max_length=4096)]


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all frames."""


class Introduction(Frame, frozen=True):
    host: str
    """Boot id and PID namespace, which a process on another host cannot know."""
    address: Packed
    """Address of the UCX worker through which others read our memory."""
    key: Packed
    """UCX's remote key of our memory."""
    probe_address: Address
    probe: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """The bytes at `probe_address`: who reads them can read, and reads the right process."""


class Offer(Frame, frozen=True):
    tag: Tag
    runs: list[Span]


class Send(Frame, frozen=True):
    tag: Tag
    first: Tag
    """UCX tag of the first piece; the following pieces count up from it."""


class Moved(Frame, frozen=True):
    tag: Tag
    ok: bool


AnyFrame = Introduction | Offer | Send | Moved

encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(AnyFrame)


def decode(data: bytes) -> AnyFrame:
    """Parse a peer's bytes. Raises one of `UNREADABLE`, and nothing else, for garbage."""
    frame: AnyFrame = _decoder.decode(data)
    return frame
