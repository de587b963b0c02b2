"""Follows the KV events of one vLLM server over ZMQ, from the first that it still has.

A publisher drops messages when its queue is full, and a subscriber may be late. Every message has a
number, so a gap is noticed. Then nothing is believed until the server has sent again what it keeps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from diptych_protocol import UNREADABLE
from diptych_protocol.wire import PrefixChanges
from diptych_router.engines.vllm.kv_events import EventsError, RememberedBlocks

log = logging.getLogger(__name__)

MAX_EVENT_BYTES: Final = 16 << 20
REPLAY_S: Final = 10.0
"""The server answers a question for old events between two batches of new ones."""
MAX_REPLAYED: Final = 1_000_000
_LAST: Final = (-1).to_bytes(8, "big", signed=True)


class EventSource(NamedTuple):
    """Where a server publishes its events. Addresses are of this server, whatever it says: a router
    connects to none that somebody names."""

    events: str
    replay: str | None
    """None: what was sent before is not sent again."""
    topic: bytes


class _Source(msgspec.Struct):
    endpoint: str
    enable_kv_cache_events: bool = False
    publisher: str = ""
    replay_endpoint: str | None = None
    topic: str = ""


def source_of(page: bytes, host: str) -> EventSource | None:
    """From `/kv_event_sources`. None: there are no events, or those of several cores, whose caches
    differ. Raises `EventsError`."""
    try:
        sources = list(msgspec.json.decode(page, type=dict[str, _Source]).values())
    except UNREADABLE as exc:
        raise EventsError(f"its sources of KV events cannot be read: {exc}") from exc
    if len(sources) != 1 or not sources[0].enable_kv_cache_events or sources[0].publisher != "zmq":
        return None
    source = sources[0]
    replay = source.replay_endpoint
    return EventSource(
        _at(host, source.endpoint),
        _at(host, replay) if replay is not None else None,
        source.topic.encode(),
    )


def _at(host: str, endpoint: str) -> str:
    """The endpoint's port at this host."""
    port = endpoint.rpartition(":")[2]
    if not endpoint.startswith("tcp://") or not port.isdigit() or not 0 < int(port) < 65536:
        raise EventsError(f"its endpoint {endpoint!r} for KV events is no port of TCP")
    return f"tcp://{host}:{port}"


async def follow(
    source: EventSource, blocks: RememberedBlocks, tell: Callable[[PrefixChanges], None]
) -> None:
    """Tell what the server remembers, and each change, for ever. Raises `EventsError`."""
    context = zmq.asyncio.Context.shadow(zmq.Context.instance())
    with _socket(context, zmq.SUB) as events:
        events.subscribe(source.topic)
        events.connect(source.events)
        expected = await _replay(context, source, blocks)
        number = 0
        tell(PrefixChanges(number, added=blocks.everything(), whole=True))
        while True:
            sequence, payload = _parts(await events.recv_multipart())
            if sequence < expected:
                continue
            number += 1
            if sequence > expected:
                log.info("KV events of %s: %d were missed", source.events, sequence - expected)
                blocks.clear()
                expected = await _replay(context, source, blocks)
                if sequence >= expected:  # nobody has the missed ones any more
                    blocks.clear()
                    blocks.take(payload)
                    expected = sequence + 1
                tell(PrefixChanges(number, added=blocks.everything(), whole=True))
                continue
            blocks.take(payload)
            expected = sequence + 1
            added, removed = blocks.changes()
            tell(PrefixChanges(number, added=added, removed=removed))


async def _replay(
    context: zmq.asyncio.Context, source: EventSource, blocks: RememberedBlocks
) -> int:
    """Take in what the server keeps. Returns the number that comes next, as far as is known."""
    if source.replay is None:
        return 0
    expected = 0
    with _socket(context, zmq.DEALER) as replay:
        replay.connect(source.replay)
        try:
            async with asyncio.timeout(REPLAY_S):
                await replay.send_multipart([b"", (0).to_bytes(8, "big")])
                for _ in range(MAX_REPLAYED):
                    _, *frames = await replay.recv_multipart()
                    if len(frames) == 3 and frames[1] == _LAST:
                        break
                    sequence, payload = _parts(frames)
                    blocks.take(payload)
                    expected = sequence + 1
        except TimeoutError as exc:
            raise EventsError(f"it did not send its old KV events in {REPLAY_S:g} s") from exc
    return expected


def _parts(frames: list[bytes]) -> tuple[int, bytes]:
    """Number and payload of a message."""
    if len(frames) != 3 or len(frames[1]) != 8:
        raise EventsError(f"a message of its KV events has {len(frames)} parts")
    return int.from_bytes(frames[1], "big"), frames[2]


def _socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_EVENT_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    return socket
