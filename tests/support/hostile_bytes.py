"""Messages that nobody should send, for both ports of an engine core.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import random
import time

import msgspec
from wire_kit import ABORT, ADD, UTILITY, Client, request

from diptych_kv_transfer.events import Connected, PeerLost
from diptych_kv_transfer.messages import (
    AnyMessage,
    Close,
    Closed,
    Hello,
    Open,
    Opened,
    Refused,
    Reject,
    Renew,
    encode,
)
from diptych_kv_transfer.ucx import UcxTransport
from diptych_protocol import UtilityCall

MAX_WAIT_S = 20.0
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
        Close(lease, ok=rng.random() < 0.5),
        Renew([lease] * rng.randrange(5)),
        Reject(lease),
        Opened(lease),
        Refused(lease, "no"),
        Closed(lease, held=True),
    ]


def pester_hinge(address: tuple[str, int], rng: random.Random, count: int) -> int:
    """Send a hinge's control port so many messages, sound ones and mutated ones.

    It cuts us off for what it cannot read; then we come again. Returns how often it did. Raises
    `TimeoutError` if it does not let us in.
    """
    transport = UcxTransport("127.0.0.1", 0)
    cuts = 0
    peer = None
    deadline = time.monotonic() + MAX_WAIT_S
    try:
        while count > 0:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no connection to the hinge at {address}")
            if peer is None:
                transport.connect(address)
            for event in transport.poll(0.0 if peer is not None else 0.2):
                match event:
                    case Connected(connected, _):
                        peer = connected
                        transport.send(peer, encode(Hello("stranger", "e", {})))
                    case PeerLost(lost) if lost == peer:
                        peer, cuts = None, cuts + 1
            if peer is None:
                continue
            for _ in range(min(count, 4)):  # few: those after one that cuts us off are lost
                payload = encode(rng.choice(control_messages(rng)))
                transport.send(peer, mutated(payload, rng) if rng.random() < 0.5 else payload)
                count -= 1
            deadline = time.monotonic() + MAX_WAIT_S
    finally:
        transport.close()
    return cuts
