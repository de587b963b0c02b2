"""What the engines of a fleet have cached, by their own reports."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import itemgetter, or_
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diptych_frontend.chain_memo import ChainMemo, part_name
from diptych_protocol import EngineCoreRequest
from diptych_protocol.block_hashes import (
    FIRST_DIGEST,
    ImageInPrompt,
    adapted,
    extend_block_hashes,
    following_hashes,
    image_key,
    next_digest,
    root_hash,
    salted,
    seen_in,
)
from diptych_protocol.wire import PREFIX_KEY_BYTES, PrefixChanges
from diptych_router.engines.block_holders import BlockHolders, Keys, Run

_KEY_OF: Final = itemgetter(slice(PREFIX_KEY_BYTES))


class BlockNaming(NamedTuple):
    """What the names of a prompt's blocks at an engine depend on, besides the request."""

    block_size: int
    adapter: str = ""
    """Digest of the content of the request's adapter there, if it has one."""


PART_BLOCKS: Final = 64
"""The keys of so many blocks of a long prompt are remembered together."""
REMEMBERED_BYTES: Final = 16 << 20
"""Room for the keys of prompts with some twenty million tokens."""


class BlockNamer:
    """Names the blocks of prompts. It remembers those of long ones, so that a prompt that begins
    like an earlier one costs little more than what is new in it. Several threads may use it."""

    def __init__(self) -> None:
        self.remembered = ChainMemo(REMEMBERED_BYTES)

    def keys(self, request: EngineCoreRequest, tokens: Sequence[int], naming: BlockNaming) -> Keys:
        """Return the keys of the full blocks of a prompt, as an engine with this naming computes
        them.

        tokens: those of the prompt, and those that were generated since. A prompt of embeddings has
        no keys that a router could know.
        """
        salt, adapter = request.cache_salt, request.lora_request
        identity = salted(salt)
        if adapter is not None:
            identity = adapted(salt, adapter.lora_name, naming.adapter)
        if not request.mm_features:
            return np.frombuffer(self._keys(root_hash(identity), tokens, naming.block_size), "<u8")
        images = [
            ImageInPrompt(image_key(feature.identifier, salt), at.offset, at.offset + at.length)
            for feature in request.mm_features
            for at in (feature.mm_position,)
        ]
        hashes: list[bytes] = []
        extra = partial(seen_in, images)
        extend_block_hashes(hashes, tokens, naming.block_size, identity, extra)
        return keys_of(hashes)

    def _keys(self, parent: bytes, tokens: Sequence[int], block_size: int) -> bytes:
        """The keys of the blocks that follow the one with this hash. It depends on all that is
        before, so it takes the place of a name."""
        first, part = 0, PART_BLOCKS * block_size
        found: list[bytes] = []
        while len(tokens) - first >= part:
            those = tokens[first : first + part]
            name = part_name(parent, array("I", those).tobytes())
            known = self.remembered.get(name)
            if known is None:
                hashes = following_hashes(parent, those, block_size)
                known = _joined_keys(hashes) + hashes[-1]
                self.remembered.put(name, known)
            parent, first = known[-len(parent) :], first + part
            found.append(known[: -len(parent)])
        found.append(_joined_keys(following_hashes(parent, tokens, block_size, first)))
        return b"".join(found)


Lengths = NDArray[np.int32]

MAX_BLOCKS: Final = 10_000_000
"""An index that has so many ignores further reports."""
MAX_EXPECTED_BLOCKS: Final = 500_000
EXPECTED_BYTES: Final = MAX_EXPECTED_BLOCKS * PREFIX_KEY_BYTES
"""The same limit for what was sent to engines in one interval."""
NOBODY: Final[list[Run]] = [(0, 0)]
Leading = tuple[int, int]
"""A number of blocks, and the engines that have this many of a prompt from the first one on."""


class Match(NamedTuple):
    """Which engines have how many blocks of a prompt, the least first; each engine that has any of
    it once. Engines are the bits of their places."""

    soon: list[Leading]
    """In memory, including what was sent there a moment ago."""
    now: list[Leading]
    """In memory."""
    stored: list[Leading]
    """As `soon`, with what can be read from disk."""


class PrefixIndex:
    """Maps block hashes to the engines that hold them: how much of a prompt each need not compute.

    It is exact up to the delay of the engines' events. Beside engines' reports, it contains what
    was sent to them a moment ago to be computed, so that a burst of similar prompts stays together.
    """

    def __init__(self) -> None:
        self.held = BlockHolders()
        """In memory, or on disk."""
        self.only_stored = BlockHolders()
        """Those of them that are on disk only."""
        self._expected = [BlockHolders(), BlockHolders()]
        """What was sent to engines since the last `age`, and between that and the one before."""

    @property
    def num_known(self) -> int:
        """Blocks that are held or expected; those that are both count twice."""
        newest, before = self._expected
        return self.held.num_blocks + newest.num_blocks + before.num_blocks

    def expect(self, engines: int, hashes: Keys) -> None:
        """Record that a prompt with these blocks, from the first on, was sent to engines (bits)."""
        if self._expected[0].num_blocks < MAX_EXPECTED_BLOCKS and len(hashes):
            self._expected[0].add_chain(engines, hashes)

    def age(self) -> None:
        """Forget what was sent before the last call, because engines have reported it by now."""
        self._expected = [BlockHolders(), self._expected[0]]

    def forget_engine(self, engine: int) -> None:
        for holders in (self.held, self.only_stored, *self._expected):
            holders.forget_engine(engine)

    def match(self, hashes: Keys) -> Match:
        """Return which engines have a prompt's blocks from the first one on, without a gap. hashes:
        the chained hashes of the prompt's full blocks."""
        num_blocks = len(hashes)
        if not num_blocks:
            return Match([], [], [])
        held = self.held.runs(hashes) if self.held.num_blocks else NOBODY
        sent: list[list[Run]] = []
        for expected in self._expected:
            if expected.num_blocks and (runs := expected.runs_of_whole(hashes)) != NOBODY:
                sent.append(runs)
        now = soon = stored = _leading(held, num_blocks)
        if sent:
            soon = stored = _leading(_joined([held, *sent], or_), num_blocks)
        if self.only_stored.num_blocks and (runs := self.only_stored.runs(hashes)) != NOBODY:
            in_memory = _joined([held, runs], _without)
            soon = now = _leading(in_memory, num_blocks)
            if sent:
                soon = _leading(_joined([in_memory, *sent], or_), num_blocks)
        return Match(soon, now, stored)


def _without(holders: int, others: int) -> int:
    return holders & ~others


def _joined(layers: Sequence[Sequence[Run]], join: Callable[[int, int], int]) -> list[Run]:
    """Who holds each block, by what each layer says of it."""
    changes: list[tuple[int, int, int]] = []
    for layer, runs in enumerate(layers):
        for at, engines in runs:
            changes.append((at, layer, engines))
    here = [0] * len(layers)
    joined: dict[int, int] = {}
    for at, layer, engines in sorted(changes):
        here[layer] = engines
        joined[at] = reduce(join, here)
    return list(joined.items())


def _leading(runs: Sequence[Run], num_blocks: int) -> list[Leading]:
    """See `Match`."""
    found = []
    have = runs[0][1]
    for at, engines in runs[1:]:
        if lost := have & ~engines:
            found.append((at, lost))
            have &= engines
    if have:
        found.append((num_blocks, have))
    return found


def lengths(found: Sequence[Leading], num_engines: int) -> Lengths:
    """Return [num_engines], how many blocks of a prompt each engine has."""
    blocks = np.zeros(num_engines, np.int32)
    for length, engines in found:
        blocks[members(engines, num_engines)] = length
    return blocks


def members(bits: int, num_engines: int) -> NDArray[np.bool_]:
    """Return [num_engines], which engines are in a set."""
    data = (bits & ((1 << num_engines) - 1)).to_bytes(-(-num_engines // 8), "little")
    unpacked = np.unpackbits(np.frombuffer(data, np.uint8), count=num_engines, bitorder="little")
    return unpacked.view(np.bool_)


log = logging.getLogger(__name__)

MAX_ENGINE_BLOCKS: Final = 2_000_000
"""An engine that reports more cached blocks is not believed, however many blocks it says it has."""
MAX_ADAPTERS: Final = 1024
"""An engine that reports more is not believed."""
MAX_IN_VAIN: Final = 600
"""How many messages are ignored before the engine is asked for everything again: ten seconds of a
busy engine's messages. Its last complete report was lost, or was not believed."""
MAX_REPEATS: Final = 3
"""The same for messages without changes, which come every few seconds."""
NO_ADAPTERS: Final[Mapping[str, str]] = {}


@dataclass(slots=True)
class _Follower:
    """What is known of one engine's messages."""

    place: int
    number: int | None = None
    """The number of the last message; None: the next message must contain everything."""
    digest: int = FIRST_DIGEST
    """The sum of what it has reported: see `next_digest`."""
    disk_digest: int = FIRST_DIGEST
    """The same of what is on disk only."""
    num_in_vain: int = 0
    """Ignored messages since `number` is None; one without changes counts as many of them."""
    num_blocks: int = 0
    num_only_stored: int = 0
    """How many of them are on disk only."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Name -> digest."""

    def agrees(self, changes: PrefixChanges) -> bool:
        """Whether the engine remembers what is known of it."""
        digests = (changes.digest, self.digest), (changes.disk_digest, self.disk_digest)
        return all(told in (0, known) for told, known in digests)


class KnownPrefixes:
    """An index by the engines' keys. It corrects errors soon: if a message is missing, or
    contradicts the others, it forgets what it knew of that engine, and the engine is asked for
    everything again."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self._followers: dict[str, _Follower] = {}
        self._free_places: list[int] = []
        self.num_gaps = 0
        """Times that a message was missing, or did not go with those before it or with itself."""

    def take(
        self, engine: str, changes: PrefixChanges, most_blocks: int = MAX_ENGINE_BLOCKS
    ) -> bool:
        """Apply a message. False: it does not continue those before it, and the engine has to be
        asked for everything again.

        most_blocks: the most blocks that an engine can have cached. One that reports more is not
        believed until it reports everything again.
        """
        follower = self._follower(engine)
        for prompt in changes.expected:
            self.index.expect(1 << follower.place, np.unique(_keys(prompt[:EXPECTED_BYTES])))
        if changes.whole:
            self._clear(follower)
            is_next = True
        elif follower.number is None:
            return not _waits_in_vain(follower, changes)
        elif changes.number == follower.number and follower.agrees(changes):
            follower.adapters = _adapters(changes)  # it is repeated, or came twice
            return True
        else:
            is_next = changes.number == follower.number + 1
        follower.digest = next_digest(follower.digest, changes.added, changes.removed)
        follower.disk_digest = next_digest(follower.disk_digest, changes.to_disk, changes.from_disk)
        if not is_next or not follower.agrees(changes):
            self.num_gaps += 1
            self._clear(follower)
            # An engine that has its own sum wrong would be asked for ever if it were asked at once.
            return changes.whole
        follower.number, follower.adapters = changes.number, _adapters(changes)
        index, place = self.index, follower.place
        added, to_disk = _keys(changes.added), _keys(changes.to_disk)
        follower.num_blocks -= index.held.remove(place, _keys(changes.removed))
        if follower.num_only_stored:
            gone = index.only_stored.remove(place, _keys(changes.from_disk))
            follower.num_only_stored -= gone
        most = min(most_blocks, MAX_ENGINE_BLOCKS)
        if max(follower.num_blocks + len(added), follower.num_only_stored + len(to_disk)) > most:
            log.warning("engine %s says to remember more blocks than it can have", engine)
            self._clear(follower)
        elif index.held.num_blocks < MAX_BLOCKS:
            follower.num_blocks += index.held.add(place, added)
            follower.num_only_stored += index.only_stored.add(place, to_disk)
        return True

    def _clear(self, follower: _Follower) -> None:
        """Nothing is known of an engine until it tells everything."""
        if follower.num_blocks:
            self.index.held.forget_engine(follower.place)
        if follower.num_only_stored:
            self.index.only_stored.forget_engine(follower.place)
        follower.number, follower.num_in_vain = None, 0
        follower.digest = follower.disk_digest = FIRST_DIGEST
        follower.num_blocks, follower.num_only_stored, follower.adapters = 0, 0, {}

    def place(self, engine: str) -> int:
        """Return the engine's place in the result of `match`, until it is forgotten."""
        return self._follower(engine).place

    def restarted(self, engine: str) -> None:
        """Record that another process answers, which has nothing cached yet."""
        follower = self._follower(engine)
        self.index.forget_engine(follower.place)
        self._followers[engine] = _Follower(follower.place)

    def has_told(self, engine: str) -> bool:
        """Whether all that it remembers is known."""
        follower = self._followers.get(engine)
        return follower is not None and follower.number is not None

    def forget(self, engine: str) -> None:
        """Forget an engine that is gone, with everything that it had cached."""
        follower = self._followers.pop(engine, None)
        if follower is not None:
            self.index.forget_engine(follower.place)
            self._free_places.append(follower.place)

    def expect(self, engine: str, keys: Keys) -> None:
        """Record that a prompt with these blocks was sent to an engine, which will compute them."""
        self.index.expect(1 << self._follower(engine).place, keys)

    def adapters(self, engine: str) -> Mapping[str, str]:
        """Return name -> digest of the content of an engine's adapters."""
        follower = self._followers.get(engine)
        return NO_ADAPTERS if follower is None else follower.adapters

    def num_cached(self, engine: str, keys: Keys, *, stored: bool = False) -> int:
        """Return how many blocks of a prompt this engine has in memory, from the first one on.
        stored: or on disk."""
        follower = self._followers.get(engine)
        if follower is None:
            return 0
        match = self.index.match(keys)
        found = match.stored if stored else match.soon
        return int(lengths(found, self.num_places)[follower.place])

    @property
    def num_places(self) -> int:
        """A number above all places."""
        return len(self._followers) + len(self._free_places)

    def _follower(self, engine: str) -> _Follower:
        follower = self._followers.get(engine)
        if follower is None:
            place = self._free_places.pop() if self._free_places else len(self._followers)
            follower = self._followers[engine] = _Follower(place)
        return follower


def _adapters(changes: PrefixChanges) -> Mapping[str, str]:
    return changes.adapters if len(changes.adapters) <= MAX_ADAPTERS else NO_ADAPTERS


def _waits_in_vain(follower: _Follower, changes: PrefixChanges) -> bool:
    """Everything is on its way, but has not come for so long that it will not."""
    is_repeat = not (changes.added or changes.removed)
    follower.num_in_vain += MAX_IN_VAIN // MAX_REPEATS if is_repeat else 1
    if follower.num_in_vain < MAX_IN_VAIN:
        return False
    follower.num_in_vain = 0
    return True


def _keys(data: bytes) -> Keys:
    """A message that is cut off loses its last key, which no engine sends."""
    return np.frombuffer(data[: len(data) - len(data) % PREFIX_KEY_BYTES], "<u8")


def keys_of(block_hashes: Iterable[bytes]) -> Keys:
    return np.frombuffer(_joined_keys(block_hashes), "<u8")


def _joined_keys(block_hashes: Iterable[bytes]) -> bytes:
    return b"".join(map(_KEY_OF, block_hashes))
