"""A line on which what engines tell of their prefixes is lost, doubled, late or forged.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from diptych_protocol.wire import PREFIX_KEY_BYTES, PrefixChanges
from diptych_router.engines.engine_link import EngineLink
from diptych_router.requests.pools.pools import Pools

FORGERIES = (
    "random keys", "another engine's keys", "false removals", "an absurd number of blocks",
    "a wrong number", "whole out of turn", "a false repeat",
)  # fmt: skip
ABSURD_BLOCKS = 100_000
"""Far more than an engine of chaos has."""
LONGEST_WAIT = 6
"""A late message comes after at most so many of the same engine that were sent after it."""
Take = Callable[[EngineLink, PrefixChanges], None]


@dataclass(frozen=True)
class Mischief:
    """The share of the messages to which each of this happens."""

    lose: float = 0.0
    double: float = 0.0
    delay: float = 0.0
    """Arrive after later messages, half of them after the next snapshot."""
    forge: float = 0.0
    """A forged message arrives before or after them, or instead of them."""

    @classmethod
    def drawn(cls, rng: random.Random) -> Mischief:
        """Often little or nothing, sometimes most messages."""
        worst = rng.choice([0.0, 0.05, 0.2, 0.5])
        return cls(*(rng.uniform(0.0, worst) for _ in fields(cls)))

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name):.0%}" for field in fields(self))


@dataclass
class _Late:
    changes: PrefixChanges
    after: int | None
    """It comes after so many more messages; None: after the next snapshot."""


class BadNews:
    """Stands between the engines' lines and the index of one router after the other."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        """What it has done since the last `begin`."""
        self._mischief, self._rng = Mischief(), random.Random(0)
        self._late: dict[str, list[_Late]] = {}
        self._links: dict[str, EngineLink] = {}
        self._keys: dict[str, bytes] = {}
        """The link of an engine -> some keys that it told."""
        self._take: Take = lambda link, changes: None

    def attach(self, pools: Pools) -> None:
        """Have this router hear of prefixes through this line only."""
        self._take = pools.take_prefixes
        self._late.clear()
        pools.take_prefixes = self.take  # type: ignore[method-assign]

    def begin(self, mischief: Mischief, rng: random.Random) -> None:
        self._mischief, self._rng = mischief, rng
        self.done.clear()

    def end(self) -> None:
        """What is late arrives; from now on all is well."""
        self._mischief = Mischief()
        for key, late in self._late.items():
            for one in late:
                self._take(self._links[key], one.changes)
        self._late.clear()

    def take(self, link: EngineLink, changes: PrefixChanges) -> None:
        """A message has come over an engine's line."""
        self._links[link.key] = link
        if changes.added:
            self._keys[link.key] = changes.added[: 32 * PREFIX_KEY_BYTES]
        for message in self._arriving(link.key, changes):
            self._take(link, message)

    def _arriving(self, key: str, changes: PrefixChanges) -> Iterator[PrefixChanges]:
        rng, mischief = self._rng, self._mischief
        forged = self._forged(key, changes) if rng.random() < mischief.forge else None
        before = rng.random() < 0.5
        if forged is not None and before:
            yield forged
        if rng.random() < mischief.lose:
            self.done["lost"] += 1
        elif rng.random() < mischief.delay:
            self.done["late"] += 1
            after = rng.choice([None, rng.randrange(1, LONGEST_WAIT)])
            self._late.setdefault(key, []).append(_Late(changes, after))
        else:
            yield changes
            if rng.random() < mischief.double:
                self.done["doubled"] += 1
                yield changes
        if forged is not None and not before:
            yield forged
        yield from self._due(key, changes)

    def _due(self, key: str, changes: PrefixChanges) -> Iterator[PrefixChanges]:
        """Those that have been late for long enough, now that this message has come."""
        waiting = self._late.pop(key, [])
        for late in waiting:
            if late.changes is changes:
                self._late.setdefault(key, []).append(late)
                continue
            if late.after is not None:
                late.after -= 1
            if late.after == 0 or (late.after is None and changes.whole):
                yield late.changes
            else:
                self._late.setdefault(key, []).append(late)

    def _forged(self, key: str, changes: PrefixChanges) -> PrefixChanges:
        rng = self._rng
        kind = rng.choice(FORGERIES)
        self.done[f"forged: {kind}"] += 1
        others = [keys for engine, keys in sorted(self._keys.items()) if engine != key]
        some = rng.choice([rng.randbytes(rng.randrange(1, 200)), *others])
        number = changes.number + rng.choice([0, 0, 1, 1, 2])
        digest = rng.choice([0, changes.digest, rng.getrandbits(32)])
        adapters = rng.choice([changes.adapters, {"forged": "digest"}])
        forged = PrefixChanges(number, some, adapters=adapters, digest=digest)
        match kind:
            case "random keys":
                forged.added = rng.randbytes(PREFIX_KEY_BYTES * rng.randrange(1, 20))
            case "another engine's keys" if others:
                forged.added = rng.choice(others)
            case "false removals":
                forged.added, forged.removed = b"", self._keys.get(key, b"")
            case "an absurd number of blocks":
                forged.added = rng.randbytes(PREFIX_KEY_BYTES * ABSURD_BLOCKS)
            case "a wrong number":
                forged.number = rng.choice([-1, 0, number - 3, number + 7, 1 << 32, (1 << 63) - 1])
            case "whole out of turn":
                forged.whole = True
                forged.number = rng.choice([number, 0, number + 1000])
                forged.added = rng.choice([b"", some])
            case "a false repeat":
                forged.added = b""
        return forged
