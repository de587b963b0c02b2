"""Somebody who reaches an engine's hinge, knows all that can be known, and means no good; and
somebody whom a decode engine was told to fetch from.

A stranger says its piece a few times and is silent from then on: it never receives what it has
asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from sim_driver import SimDriver
from sim_model import Memory
from sim_network import Network

from diptych_kv_transfer.tables.actions import Address, Connected, Event, Peer, Received
from diptych_kv_transfer.tables.lease import Lease
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

Say = Callable[[SimDriver, Random], list[AnyMessage | bytes]]
TIMES, EVERY_S = 4, 0.01
ME = Hello("stranger", "1", {"model": "m"})


def _nothing(victim: SimDriver, random: Random) -> list[AnyMessage | bytes]:
    return []


def _nonsense(victim: SimDriver, random: Random) -> list[AnyMessage | bytes]:
    return [ME, random.randbytes(20)]


def _no_hello(victim: SimDriver, random: Random) -> list[AnyMessage | bytes]:
    return [Renew(["lease"])]


def _takes_a_lease(victim: SimDriver, random: Random) -> list[AnyMessage | bytes]:
    return [
        ME,
        *(Open(x.lease_id, x.digest, 7, [(0, x.num_blocks)], True) for x in _leases(victim)),
    ]


def _asks_for_more(victim: SimDriver, random: Random) -> list[AnyMessage | bytes]:
    return [ME, *(Open(x.lease_id, x.digest, 7, [(0, x.num_blocks + 1)]) for x in _leases(victim))]


def _asks_for_others(victim: SimDriver, random: Random) -> list[AnyMessage | bytes]:
    return [ME, *(Open(x.lease_id, x.digest, 7, [(x.num_blocks, 1)]) for x in _leases(victim))]


def _guesses(victim: SimDriver, random: Random) -> list[AnyMessage | bytes]:
    lease_id = f"{random.getrandbits(128):032x}"
    return [ME, Open(lease_id, "", 7, [(0, 1)]), Renew([lease_id]), Reject(lease_id)]


def _closes(victim: SimDriver, random: Random) -> list[AnyMessage | bytes]:
    """With the very tag of the claim."""
    claimed = [x for x in _leases(victim) if x.claim is not None]
    return [ME, *(Close(x.lease_id, True, x.claim.tag) for x in claimed if x.claim is not None)]


def _takes_a_prefix(victim: SimDriver, random: Random) -> list[AnyMessage | bytes]:
    """All that is remembered, under the id of a lease of its own, again and again."""
    names = list(victim.pool.remembered())
    lease_id = f"{random.getrandbits(128):032x}"
    return [ME, Open(lease_id, "", 7, [(0, len(names) or 1)], False, names or [b"?"])]


def _asks_foolishly(victim: SimDriver, random: Random) -> list[AnyMessage | bytes]:
    """For prefixes that cannot be lent."""
    names, [one, two, three] = [b"?", b"!"], [f"{random.getrandbits(128):032x}" for _ in range(3)]
    ask = Open(one, "", 7, [(0, 2)], False, names)
    return [
        ME, ask, Open(one, "", 8, [(0, 2)], False, names), Open(two, "", 7, [], False, names),
        Open(three, "", 7, [(1, 2)], False, names), Open(three, "", 7, [(0, 3)], False, names),
    ]  # fmt: skip


def _answers_for_prefill(victim: SimDriver, random: Random) -> list[AnyMessage | bytes]:
    said: list[AnyMessage | bytes] = [ME]
    for load in victim.hinge.loads.loads.values():
        lease_id, runs = load.lease.lease_id, [(index, 1) for index in load.wanted]
        said += [
            Closed(lease_id, True, load.tag),
            Opened(lease_id, load.tag, random.randrange(3)),
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
    "takes a prefix and does not read": _takes_a_prefix,
    "asks for prefixes that cannot be": _asks_foolishly,
    ANSWERS: _answers_for_prefill,
    "talks nonsense": _nonsense,
}


def _leases(victim: SimDriver) -> list[Lease]:
    return list(victim.hinge.leases.leases.values())


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

    def __init__(self, network: Network, kind: str, victim: SimDriver) -> None:
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
