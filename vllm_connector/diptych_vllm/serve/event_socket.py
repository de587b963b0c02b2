"""Follows the KV events of vLLM's core over ZMQ, from the first one that the core still has.

A publisher drops messages when its queue is full, and a subscriber may be late. Every message has a
number, so a gap is noticed. Then this module reports nothing until the core has sent the events
again that it keeps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import zmq
import zmq.asyncio

from diptych_vllm.serve.kv_events import EventsError, RememberedBlocks

log = logging.getLogger(__name__)

MAX_EVENT_BYTES: Final = 16 << 20
REPLAY_S: Final = 10.0
"""How long old events may take: the server sends them between two batches of new ones."""
MAX_PORTS: Final = 1 << 16
MAX_REPLAYED: Final = 1_000_000
_LAST: Final = (-1).to_bytes(8, "big", signed=True)


class EventSource(NamedTuple):
    """Where a core publishes its events, on this machine."""

    events: str
    replay: str | None
    """Where old events are sent again; None: nowhere."""
    topic: bytes


class PublishedEvents(Protocol):
    """vLLM's `KVEventsConfig`."""

    endpoint: str
    enable_kv_cache_events: bool
    publisher: str | None
    replay_endpoint: str | None
    topic: str


def source_of(published: Sequence[PublishedEvents]) -> EventSource | None:
    """Return where these cores publish their events; None if they publish none, or if there are
    several cores, whose caches differ. Raises `EventsError`."""
    if len(published) != 1:
        return None
    [core] = published
    if not core.enable_kv_cache_events or core.publisher != "zmq":
        return None
    replay = core.replay_endpoint
    return EventSource(
        _here(core.endpoint), _here(replay) if replay is not None else None, core.topic.encode()
    )


def _here(endpoint: str) -> str:
    """Return the endpoint at which this machine reaches the publisher."""
    if endpoint.startswith("ipc://"):
        return endpoint
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdigit() or not 0 < int(port) < MAX_PORTS:
        raise EventsError(f"its endpoint {endpoint!r} for KV events is neither ipc:// nor of TCP")
    return f"tcp://{'127.0.0.1' if host == '*' else host}:{port}"


async def follow(
    source: EventSource, blocks: RememberedBlocks, changed: Callable[[], None]
) -> None:
    """Record the blocks that the core remembers, for ever, and call `changed` after each change.

    Raises `EventsError`.
    """
    context = zmq.asyncio.Context.shadow(zmq.Context.instance())
    with _socket(context, zmq.SUB) as events:
        events.subscribe(source.topic)
        events.connect(source.events)
        expected = await _replay(context, source, blocks)
        changed()
        while True:
            sequence, payload = _parts(await events.recv_multipart())
            if sequence < expected:
                continue
            if sequence > expected:
                log.info("KV events of %s: %d were missed", source.events, sequence - expected)
                blocks.clear()
                expected = await _replay(context, source, blocks)
                if sequence >= expected:  # nobody has the missed ones any more
                    blocks.clear()
            if sequence >= expected:
                blocks.take(payload)
                expected = sequence + 1
            changed()


async def _replay(
    context: zmq.asyncio.Context, source: EventSource, blocks: RememberedBlocks
) -> int:
    """Process the events that the server keeps. Returns the next one's number, if known."""
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
    """Return the number and the payload of a message."""
    if len(frames) != 3 or len(frames[1]) != 8:
        raise EventsError(f"a message of its KV events has {len(frames)} parts")
    return int.from_bytes(frames[1], "big"), frames[2]


def _socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_EVENT_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    return socket
