"""Learns how fast KV moves from each prefill engine to each decode engine.

The rate of a pair comes from its own moves. If these are few, it comes from the moves of all pairs
that are as near to each other. If these are few too, it comes from all that the receiving engine
has received. The caller passes the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diptych_protocol.engine_stats import Move

Floats = NDArray[np.float64]
Nearnesses = NDArray[np.int8]

PRIOR_MOVES: Final = 8.0
"""Prior knowledge counts as much as this many moves."""
FADING: Final = 0.998
"""How much the moves between engines of the same nearness count when another one has come."""
FADING_S: Final = 600.0
"""The moves of a pair count 1/e after this long, so that a pair that was slow is tried again."""
SHORTEST_S: Final = 1e-12
MOST_TOKENS: Final = 1e8
MOST_SECONDS: Final = 1e4
"""A longer move is ignored."""
MOST_TIMES: Final = 32.0
"""A move counts as at most this many times as slow as moves to the same engine usually are, so that
a single one that hung does not decide."""


class Nearness(IntEnum):
    """The nearest first. UNKNOWN: the zone of one is not known, and perhaps not the node."""

    NODE = 0
    ZONE = 1
    UNKNOWN = 2
    APART = 3


_ALL: Final = slice(None)
WORDS: Final = ("same node", "same zone", "", "other zone")
"""Names by nearness."""


class Location(NamedTuple):
    """Where an engine runs; empty if unknown."""

    node: str = ""
    zone: str = ""


NOWHERE: Final = Location()


class _Sender(NamedTuple):
    """`engine_id`, and where it runs."""

    name: str = ""
    location: Location = NOWHERE


def nearness(one: Location, other: Location) -> Nearness:
    if one.node and one.node == other.node:
        return Nearness.NODE
    if not one.zone or not other.zone:
        return Nearness.UNKNOWN
    return Nearness.ZONE if one.zone == other.zone else Nearness.APART


class Pairing(NamedTuple):
    """What the choice of an engine means for those of the other pool. Arrays are [engines]."""

    extra: Floats
    """Seconds by which a hand-off takes longer than with an average sender; negative if shorter."""
    near: Nearnesses


class Ways(NamedTuple):
    """See `PairRates.ways`."""

    near: Nearnesses
    """[receivers, senders]"""
    token_s: Floats | None
    """[receivers, senders] Seconds for a token; None if no move has been reported."""
    lacking: Floats
    usual: Floats

    def from_sender(self, at: int) -> Pairing:
        """Return how much more or less the receivers cost if this one sends."""
        if self.token_s is None:
            return Pairing(np.zeros(len(self.near)), self.near[:, at])
        return Pairing(self.lacking * (self.token_s[:, at] - self.usual), self.near[:, at])

    def to_receiver(self, at: int) -> Pairing:
        """Return how much more or less the senders cost if this one receives."""
        near = self.near[at]
        if self.token_s is None:
            return Pairing(np.zeros(len(near)), near)
        return Pairing(float(self.lacking[at]) * (self.token_s[at] - self.usual[at]), near)


class PairRates:
    """Senders are the prefill engines, receivers the decode engines, in the order of their tables.
    The arrays take 21 bytes for each pair: 5 MB with 500 engines in each pool."""

    def __init__(self) -> None:
        self.learned = False
        """Some move has taught something."""
        self.placed = False
        """Some pair is known to be near or apart."""
        self.near: Nearnesses = np.zeros((0, 0), np.int8)
        """[receivers, senders] A `Nearness`."""
        self._token_s: Floats = np.zeros((0, 0))
        """[receivers, senders] Seconds that a token of KV takes; only if `learned`."""
        self._moved = np.zeros((0, 3, 0), np.float32)
        """[receivers; moves, tokens and seconds; senders] What counts of the pair's own moves."""
        self._moved_by_nearness: Floats = np.zeros((3, len(Nearness)))
        self._faded_at: list[float] = []
        """[receivers]"""
        self._senders: list[_Sender] = []
        self._receivers: list[Location] = []
        self._sender_of: dict[str, int] = {}
        """`engine_id` -> where it stands."""

    # --- who is there -------------------------------------------------------------------------

    def add(self, *, sends: bool) -> None:
        """Add a sender or receiver, of which nothing is known. It comes last."""
        if sends:
            self._senders.append(_Sender())
        else:
            self._receivers.append(NOWHERE)
            self._faded_at.append(0.0)
        row, column = ((0, 0), (0, 1)) if sends else ((0, 1), (0, 0))
        unknown = np.int8(Nearness.UNKNOWN)
        self.near = np.pad(self.near, (row, column), constant_values=unknown)
        self._token_s = np.pad(self._token_s, (row, column))
        self._moved = np.pad(self._moved, (row, (0, 0), column))

    def remove(self, at: int, *, sends: bool) -> None:
        """Remove a sender or receiver; those after it move up."""
        axis = 1 if sends else 0
        self.near = np.delete(self.near, at, axis)
        self._token_s = np.delete(self._token_s, at, axis)
        self._moved = np.delete(self._moved, at, 2 * axis)
        if sends:
            del self._senders[at]
            self._name_senders()
        else:
            del self._receivers[at], self._faded_at[at]

    def is_at(self, at: int, name: str, location: Location, trips: Floats, *, sends: bool) -> None:
        """Record which engine answers. What was known of another engine, or at another place, is
        dropped. name: its `engine_id`. trips: see `saw`."""
        receivers, senders = (_ALL, slice(at, at + 1)) if sends else (slice(at, at + 1), _ALL)
        if sends:
            changed = self._senders[at] != (name, location)
            self._senders[at] = _Sender(name, location)
            self._name_senders()
            self.near[:, at] = [nearness(location, x) for x in self._receivers]
        else:
            changed = self._receivers[at] != location
            self._receivers[at] = location
            self.near[at] = [nearness(location, x.location) for x in self._senders]
        if changed:
            self._moved[receivers, :, senders] = 0
        self.placed = bool((self.near != Nearness.UNKNOWN).any())
        if self.learned:
            self._estimate(receivers, senders, trips)

    def location(self, at: int, *, sends: bool) -> Location:
        return self._senders[at].location if sends else self._receivers[at]

    def _name_senders(self) -> None:
        self._sender_of = {x.name: at for at, x in enumerate(self._senders) if x.name}

    # --- what is known ------------------------------------------------------------------------

    def ways(self, lacking: Floats, usual: Floats) -> Ways:
        """Return the distances from each sender to each receiver, for one request. Unless it has
        `learned` or `placed`, all are equal, as far as is known.

        lacking: [receivers] Tokens to hand over. usual: [receivers] Seconds for a token, whichever
        engine sends, as in the costs of receivers.
        """
        return Ways(self.near, self._token_s if self.learned else None, lacking, usual)

    # --- what moves teach ---------------------------------------------------------------------

    def saw(
        self, receiver: int, moves: Sequence[Move], block_size: float, trips: Floats, now: float
    ) -> None:
        """Learn from a receiver's report of moves. Impossible moves are ignored. trips: [2,
        receivers] Seconds of a move, and of a token in it, whichever engine sends."""
        trip_s, token_s = trips[:, receiver].tolist()
        moved, near = self._moved[receiver], self.near[receiver]
        idle_s = max(0.0, now - self._faded_at[receiver])
        self._faded_at[receiver] = now
        moved *= math.exp(-idle_s / FADING_S)
        taught = False
        for move in moves:
            sender, tokens = self._sender_of.get(move.sender), move.num_blocks * block_size
            if sender is None or not 0 < tokens <= MOST_TOKENS:
                continue
            if not 0 <= move.seconds <= MOST_SECONDS:
                continue
            seconds = min(move.seconds, MOST_TIMES * (trip_s + tokens * token_s))
            moved[:, sender] += 1.0, tokens, seconds
            if near[sender] != Nearness.UNKNOWN:
                self._moved_by_nearness[:, near[sender]] *= FADING
                self._moved_by_nearness[:, near[sender]] += 1.0, tokens, seconds
            taught = True
        if self.learned:
            self._estimate(slice(receiver, receiver + 1), _ALL, trips)
        elif taught:
            self.learned = True
            self._estimate(_ALL, _ALL, trips)

    def _estimate(self, receivers: slice, senders: slice, trips: Floats) -> None:
        trip_s, token_s = trips[:, receivers, np.newaxis]
        near = self.near[receivers, senders]
        expected = _shrunk(self._moved_by_nearness.take(near, 1), trip_s, token_s)
        own = self._moved[receivers, :, senders].swapaxes(0, 1)
        self._token_s[receivers, senders] = _shrunk(own, trip_s, expected)


def _shrunk(moved: NDArray[np.floating], trip_s: Floats, token_s: Floats) -> Floats:
    """Seconds that a token takes: so many times as much as was known beforehand as the moves took
    longer than was known beforehand. So where bytes weigh little they tell little.

    moved: [3, ...] moves, tokens, seconds. token_s: what was known beforehand.
    """
    moves, tokens, seconds = moved
    times = moves * seconds / np.maximum(moves * trip_s + tokens * token_s, SHORTEST_S)
    shrunk: Floats = token_s * (PRIOR_MOVES + times) / (PRIOR_MOVES + moves)
    return shrunk
