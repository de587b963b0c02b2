"""What two transports say to each other about blocks, beside the messages that they carry.

    P                                   D
    Introduction ─────────────────────▶     how my memory can be read, where my socket is (once)
    Offer        ─────────────────────▶     where the runs are in P's memory
                                            on one host, D reads them
             ◀═════════════════════════     elsewhere it asks for them over the socket
             ◀───────────────── PutInto     with RDMA it says where they are to go in its memory
    Moved    ◀────────────────────────▶     whoever moved them says that it is over

Over the socket nobody says Moved: the bytes themselves tell. Sizes are checked where they arrive.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_FRAME_BYTES = 8 << 20
"""Runs of a million tokens in scattered blocks of 16 fit in."""

Tag = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Address = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Length = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Span = tuple[Address, Length]
"""Bytes of one process's memory."""


class Process(msgspec.Struct, frozen=True, array_like=True):
    """A process, as far as another one needs it to read its memory."""

    host: str
    """Boot and PID namespace: processes with the same may know each other by pid."""
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    probe_address: Address
    probe: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """What is found there, so that a reader knows that it reads the right process."""


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all frames."""


class Introduction(Frame, frozen=True):
    process: Process
    port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    token: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """To be said first over the socket."""


class Offer(Frame, frozen=True):
    tag: Tag
    runs: list[Span]


class PutInto(Frame, frozen=True):
    tag: Tag
    targets: list[tuple[Address, Annotated[int, msgspec.Meta(ge=0)]]]
    """For each run where it goes, and the index of the key of that memory."""
    keys: list[Annotated[bytes, msgspec.Meta(min_length=1, max_length=4096)]]
    """Packed UCX remote keys."""


class Moved(Frame, frozen=True):
    tag: Tag
    ok: bool


AnyFrame = Introduction | Offer | PutInto | Moved

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyFrame).decode
"""Raises `msgspec.MsgspecError` for what is not a frame."""
