"""Somebody who reaches an engine's hinge, knows all that can be known, and means no good; and
somebody whom a decode engine was told to fetch from.

A stranger says its piece a few times and is silent from then on: it never receives what it has
asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from sim_model import Memory
from sim_network import Network

from diptych_kv_transfer.tables.actions import Address, Peer
from diptych_kv_transfer.tables.events import Connected, Event, Received
from diptych_kv_transfer.tables.hinge import Hinge
from diptych_kv_transfer.tables.leases import Lease
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
    Sending,
    decode,
    encode,
)

Say = Callable[[Hinge, Random], list[AnyMessage | bytes]]
TIMES, EVERY_S = 4, 0.01
ME = Hello("stranger", "1", {"model": "m"})


def _nothing(hinge: Hinge, random: Random) -> list[AnyMessage | bytes]:
    return []


def _nonsense(hinge: Hinge, random: Random) -> list[AnyMessage | bytes]:
    return [ME, random.randbytes(20)]


def _no_hello(hinge: Hinge, random: Random) -> list[AnyMessage | bytes]:
    return [Renew(["lease"])]


def _takes_a_lease(hinge: Hinge, random: Random) -> list[AnyMessage | bytes]:
    return [ME, *(Open(x.lease_id, x.digest, 7, [(0, x.num_blocks)], True) for x in _leases(hinge))]


def _asks_for_more(hinge: Hinge, random: Random) -> list[AnyMessage | bytes]:
    return [ME, *(Open(x.lease_id, x.digest, 7, [(0, x.num_blocks + 1)]) for x in _leases(hinge))]


def _asks_for_others(hinge: Hinge, random: Random) -> list[AnyMessage | bytes]:
    return [ME, *(Open(x.lease_id, x.digest, 7, [(x.num_blocks, 1)]) for x in _leases(hinge))]


def _guesses(hinge: Hinge, random: Random) -> list[AnyMessage | bytes]:
    lease_id = f"{random.getrandbits(128):032x}"
    return [ME, Open(lease_id, "", 7, [(0, 1)]), Renew([lease_id]), Reject(lease_id)]


def _closes(hinge: Hinge, random: Random) -> list[AnyMessage | bytes]:
    """With the very tag of the claim."""
    claimed = [x for x in _leases(hinge) if x.claim is not None]
    return [ME, *(Close(x.lease_id, True, x.claim.tag) for x in claimed if x.claim is not None)]


def _answers_for_prefill(hinge: Hinge, random: Random) -> list[AnyMessage | bytes]:
    said: list[AnyMessage | bytes] = [ME]
    for load in hinge.loads.loads.values():
        lease_id, runs = load.lease.lease_id, [(index, 1) for index in load.wanted]
        said += [
            Closed(lease_id, True, load.tag),
            Opened(lease_id, load.tag),
            Sending(lease_id, load.tag, load.tag, runs),
            Refused(lease_id, "no", load.tag),
        ]
    return said


ANSWERS = "answers in P's place"
STRANGERS: dict[str, Say] = {
    "says nothing": _nothing,
    "does not say who it is": _no_hello,
    "takes a lease and does not read": _takes_a_lease,
    "asks for more blocks than there are": _asks_for_more,
    "asks for blocks behind the last": _asks_for_others,
    "guesses": _guesses,
    "closes what others read": _closes,
    ANSWERS: _answers_for_prefill,
    "talks nonsense": _nonsense,
}


def _leases(hinge: Hinge) -> list[Lease]:
    return list(hinge.leases.leases.values())


class Liar:
    """Pretends to be a prefill engine, and sends what nobody asked for."""

    address: Address = ("10.0.0.66", 1)
    alive = True
    compat: dict[str, int | str] = ME.compat

    def __init__(self, network: Network) -> None:
        self.memory = Memory(0, "liar")
        self.poses_as = ME
        self._network = network

    def report(self, event: Event) -> None:
        match event:
            case Connected(peer):
                self._network.send(peer, encode(self.poses_as))
            case Received(peer, data):
                message = decode(data)
                if isinstance(message, Open):
                    sending = Sending(message.lease_id, message.tag, message.tag, [(99, 1)])
                    self._network.send(peer, encode(sending))
            case _:
                pass

    def may_touch(self, blocks: range) -> None:
        raise AssertionError("P2: a liar has no blocks")


class Stranger:
    """A host that nobody started."""

    address: Address = ("stranger", 1)
    alive = True
    compat: dict[str, int | str] = ME.compat

    def __init__(self, network: Network, kind: str, victim: Hinge) -> None:
        self.memory = Memory(0, "stranger")
        self._network = network
        self._kind = kind
        self._victim = victim

    def report(self, event: Event) -> None:
        if isinstance(event, Connected):
            for number in range(TIMES):
                self._network.clock.after(number * EVERY_S, self._speak, event.peer)

    def _speak(self, peer: Peer) -> None:
        for said in STRANGERS[self._kind](self._victim, self._network.random):
            self._network.send(peer, said if isinstance(said, bytes) else encode(said))

    def may_touch(self, blocks: range) -> None:
        raise AssertionError("P2: blocks travel to a stranger who posted no receive")
