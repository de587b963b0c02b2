"""Tells the clients that follow a core which blocks it remembers, so that they know where to send a
prompt.

A change waits for the next message, which is sent when nothing is computed, or else every
`INTERVAL_S`. What new prompts will bring is told before they are computed. All followers get the
same bytes. While nothing changes, the number and the digest of the last message are repeated, so
that a follower who has missed it notices that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from diptych_protocol.block_hashes import FIRST_DIGEST, next_digest
from diptych_protocol.wire import PREFIX_KEY_BYTES, PrefixChanges

INTERVAL_S: Final = 0.02
REPEAT_S: Final = 2.0
"""The last number is repeated if there was nothing to tell for so long."""
MAX_FOLLOWERS: Final = 256
"""A client beyond them is told nothing, and routes by load."""


class RemembersPrefixes(Protocol):
    """Whoever keeps the blocks of prompts, as a core's block pool does."""

    def record_changes(self, wanted: bool) -> None:
        """Note what `take_changes` returns, or cease to."""

    def remembered_hashes(self) -> list[bytes]:
        """The hashes of all blocks that later prompts may share."""

    def take_changes(self) -> dict[bytes, bool]:
        """Hash -> whether it is remembered now, for all blocks that changed since the last call."""


class PrefixNews:
    """What followers are to be told."""

    def __init__(
        self,
        memory: RemembersPrefixes,
        adapters: Callable[[], dict[str, str]],
        only_stored: RemembersPrefixes | None = None,
    ) -> None:
        """`adapters`: see `PrefixChanges`. only_stored: those of the blocks that are on disk only;
        None: there is no disk."""
        self._memory, self._only_stored = memory, only_stored
        self._adapters = adapters
        self.followers: set[bytes] = set()
        self._number, self._digest, self._disk_digest = 0, FIRST_DIGEST, FIRST_DIGEST
        self._due = self._repeat_at = 0.0
        self.expected: list[bytes] = []
        """See `PrefixChanges`."""

    def follow(self, client: bytes) -> PrefixChanges | None:
        """A client wants to know of every change after this answer; None: too many do already.

        The others must have been sent what `take` returns before.
        """
        if client not in self.followers and len(self.followers) >= MAX_FOLLOWERS:
            return None
        if not self.followers:
            self._record_changes(True)
        self.followers.add(client)
        remembered = b"".join(map(_key, self._memory.remembered_hashes()))
        self._digest = next_digest(FIRST_DIGEST, remembered, b"")
        stored = () if self._only_stored is None else self._only_stored.remembered_hashes()
        on_disk = b"".join(map(_key, stored))
        self._disk_digest = next_digest(FIRST_DIGEST, on_disk, b"")
        return PrefixChanges(
            self._number,
            remembered,
            whole=True,
            adapters=self._adapters(),
            digest=self._digest,
            to_disk=on_disk,
            disk_digest=self._disk_digest,
        )

    def _record_changes(self, wanted: bool) -> None:
        self._memory.record_changes(wanted)
        if self._only_stored is not None:
            self._only_stored.record_changes(wanted)

    def forget(self, client: bytes) -> None:
        """A client is gone."""
        if client in self.followers:
            self.followers.remove(client)
            if not self.followers:
                self._record_changes(False)
                self.expected = []  # whoever follows next knows nothing of that prompt

    @property
    def tells_others(self) -> bool:
        """Whether some followers do not know what another one sends."""
        return len(self.followers) > 1

    def expect(self, hashes: Sequence[bytes]) -> None:
        """A prompt with these blocks has come."""
        self.expected.append(b"".join(map(_key, hashes)))

    def take(self, now: float, *, at_once: bool) -> PrefixChanges | None:
        """What there is to tell, if it is time to tell it, or if it is wanted at once. A message
        without changes has the number of the one before."""
        if not self.followers or (now < self._due and not at_once):
            return None
        changes = self._memory.take_changes()
        moved = {} if self._only_stored is None else self._only_stored.take_changes()
        expected, self.expected = self.expected, []
        if not (changes or moved or expected) and now < self._repeat_at:
            return None
        self._due, self._repeat_at = now + INTERVAL_S, now + REPEAT_S
        message = PrefixChanges(
            self._number + bool(changes or moved),
            b"".join(_key(block) for block, remembered in changes.items() if remembered),
            b"".join(_key(block) for block, remembered in changes.items() if not remembered),
            adapters=self._adapters(),
            expected=expected,
        )
        if moved:
            message.to_disk = b"".join(_key(block) for block, stored in moved.items() if stored)
            message.from_disk = b"".join(_key(name) for name, stored in moved.items() if not stored)
            self._disk_digest = next_digest(self._disk_digest, message.to_disk, message.from_disk)
        if changes or moved:
            self._number = message.number
            self._digest = next_digest(self._digest, message.added, message.removed)
        message.digest, message.disk_digest = self._digest, self._disk_digest
        return message


def _key(block_hash: bytes) -> bytes:
    return block_hash[:PREFIX_KEY_BYTES]
