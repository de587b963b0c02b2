"""Messages that nobody should send, for both ports of an engine core.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import contextlib
import random
import time

import msgspec
import numpy as np
from engine_kit.wire import ABORT, ADD, UTILITY, Client, request
from numpy.typing import NDArray
from waits import PATIENCE_S

from diptych_kv_transfer.signing.references import HingeKey
from diptych_kv_transfer.tables.actions import Connected, ConnectFailed, Peer, PeerLost, Received
from diptych_kv_transfer.tables.messages import (
    AnyMessage,
    Close,
    Closed,
    Hello,
    Open,
    Opened,
    Refused,
    Reject,
    Renew,
    decode,
    encode,
)
from diptych_kv_transfer.transports.ucx import frames, requests
from diptych_kv_transfer.transports.ucx.frames import Moved, Offer, Send
from diptych_kv_transfer.transports.ucx.libucp import UcpError
from diptych_kv_transfer.transports.ucx.stream import FRAME, MESSAGE
from diptych_kv_transfer.transports.ucx.ucx_transport import UcxTransport
from diptych_protocol import CurveKeys, UtilityCall

FRAMES = Offer(3, [(1, 10)] * 3), Send(3, 1 << 40), Moved(3, ok=True)
BATCH = 500
"""So many messages are under way at most."""


def mutated(payload: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, and sometimes some cut off, doubled or put in."""
    data = bytearray(payload)
    for _ in range(rng.randint(1, 4)):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    match rng.randrange(8):
        case 0:
            del data[rng.randrange(len(data)) :]
        case 1:
            data += bytes(data)
        case 2:
            at = rng.randrange(len(data) + 1)
            data[at:at] = rng.randbytes(rng.randint(1, 8))
    return bytes(data)


def pester_core(endpoint: str, rng: random.Random, count: int) -> None:
    """Send a core so many mutated messages; it has handled all of them when this returns."""
    good = [
        (ADD, msgspec.msgpack.encode(request("m", max_tokens=2))),
        (ABORT, msgspec.msgpack.encode(["m"])),
        (UTILITY, msgspec.msgpack.encode(UtilityCall(0, 1, "stats", []))),
    ]
    stranger = Client(endpoint)
    for number in range(count):
        kind, payload = rng.choice(good)
        stranger.send(rng.choice([kind, kind, rng.randbytes(1)]), mutated(payload, rng))
        if number % BATCH == 0 or number == count - 1:
            stranger.call("stats")
    stranger.socket.close()


def control_messages(rng: random.Random) -> list[AnyMessage]:
    """One of each kind, about leases that may or may not be."""
    lease = f"{rng.getrandbits(128):032x}"
    runs = [(rng.randrange(100), rng.randrange(1, 100)) for _ in range(rng.randrange(4))]
    return [
        Hello("somebody", "e", {"dtype": "float32"}),
        Open(lease, "digest", rng.getrandbits(60), runs),
        Open(lease, "", rng.getrandbits(60), runs, names=[rng.randbytes(16)] * rng.randrange(200)),
        Close(lease, ok=rng.random() < 0.5),
        Renew([lease] * rng.randrange(5)),
        Reject(lease),
        Opened(lease, num_blocks=rng.randrange(3)),
        Refused(lease, "no"),
        Closed(lease, held=True),
    ]


def pester_hinge(address: tuple[str, int], key: HingeKey, rng: random.Random, count: int) -> int:
    """Send a hinge so many messages, sound ones and mutated ones, as somebody who has its key.

    It has decided about all of them when this returns: after every few, something is asked that it
    must answer, unless it has cut us off for what it cannot read; then we come again. Returns how
    often it did. Raises `TimeoutError` if it does not let us in, or does not answer.
    """
    transport = UcxTransport("127.0.0.1", 0, key)
    cuts = 0
    try:
        while count > 0:
            peer = _visit(transport, address)
            while peer is not None and count > 0:
                for _ in range(min(count, 4)):  # few: those after one that cuts us off are lost
                    _say_something(transport, peer, rng)
                    count -= 1
                if not _is_answered(transport, peer, f"{rng.getrandbits(128):032x}"):
                    peer, cuts = None, cuts + 1  # type: ignore[assignment]
    finally:
        transport.close()
    return cuts


def _say_something(transport: UcxTransport, peer: Peer, rng: random.Random) -> None:
    """A message, or what only the transport says; every other time with other bytes in it."""
    if rng.random() < 0.2:
        kind, payload = FRAME, frames.encode(rng.choice(FRAMES))
    else:
        kind, payload = MESSAGE, encode(rng.choice(control_messages(rng)))
    if rng.random() < 0.5:
        payload = mutated(payload, rng)
    connection = transport._connections.get(peer)
    if connection is not None and not connection.lost:
        connection.stream.send(kind, payload)


def knock_without_its_key(address: tuple[str, int], rng: random.Random, seconds: float) -> int:
    """Come to a hinge again and again, prove nothing, and send what nobody waits for; how often."""
    transport = UcxTransport(
        "127.0.0.1", 0, HingeKey.of(CurveKeys("nobody's", rng.randbytes(9).hex()))
    )
    if rng.random() < 0.5:
        # Else it is cut off for what it proves; so, when its time is over.
        transport._shake = lambda *_: None  # type: ignore[method-assign]
    message, visits = np.zeros(8 << 10, np.uint8), 0
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            transport.connect(address)
            visits += 1
            for _ in range(5):
                transport.poll(0.01)
                for connection in transport._connections.values():
                    if not connection.lost:
                        _send_tag(connection.endpoint.handle, message, rng.getrandbits(62))
    finally:
        transport.close()
    return visits


def _send_tag(endpoint: int, message: NDArray[np.uint8], tag: int) -> None:
    with contextlib.suppress(UcpError):
        requests.free(requests.tag_send(endpoint, message.ctypes.data, message.nbytes, tag))


def _visit(transport: UcxTransport, address: tuple[str, int]) -> Peer:
    """Connect and say who we are; whether we are let in shows later."""
    deadline = time.monotonic() + PATIENCE_S
    transport.connect(address)
    while time.monotonic() < deadline:
        for event in transport.poll(0.2):
            match event:
                case Connected(peer, _):
                    transport.send(peer, encode(Hello("stranger", "e", {})))
                    return peer
                case ConnectFailed():
                    transport.connect(address)
    raise TimeoutError(f"no connection to the hinge at {address}")


def _is_answered(transport: UcxTransport, peer: Peer, lease: str) -> bool:
    """Ask for a lease that is not there; False: we were cut off."""
    transport.send(peer, encode(Open(lease, "digest", 0, [])))
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for event in transport.poll(0.2):
            match event:
                case PeerLost(lost) if lost == peer:
                    return False
                case Received(_, data):
                    message = decode(data)
                    if isinstance(message, Refused) and message.lease_id == lease:
                        return True
    raise TimeoutError("the hinge does not answer")
