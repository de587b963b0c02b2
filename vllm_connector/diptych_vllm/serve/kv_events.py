"""Tracks which blocks vLLM's core has cached, by its KV events. It performs no I/O.

The events name blocks by vLLM's own hashes, and bring the tokens. The tokens are hashed anew, as
Diptych's engines name their blocks, so that one index knows both. Facts from vLLM 0.32: events are
tagged maps; the salt of a request is among the extra keys of its first block only.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from diptych_protocol import UNREADABLE, UtilityError
from diptych_protocol.block_hashes import adapted, extend_block_hashes, root_hash, salted

ON_THE_DEVICE: Final = (None, "GPU")
"""The `medium` of blocks that a request can use at once; the CPU build says GPU, too."""
WHOLE: Final = ("full_attention", "mla_attention", "sink_full_attention")
"""Kinds of layers that need the whole prefix, and so keep all its blocks. Others give back those
behind their window, though the prefix can still be used."""

BY_DIGEST: Final = "@"
"""Stands between the name of an adapter and the digest of its files, in its name in vLLM."""

_Hash = bytes | int
_Token = Annotated[int, Meta(ge=0, lt=1 << 62)]


class _Event(msgspec.Struct, tag=True, gc=False):
    pass


class BlockStored(_Event):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[_Token]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(_Event):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_decoder: Final = msgspec.msgpack.Decoder(_Batch)


class EventsError(UtilityError):
    """Events that contradict each other, or are of an unknown form."""


class RememberedBlocks:
    """The blocks of one core: at most as many as the core says that it has room for."""

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self._block_size, self._max_blocks = block_size, max_blocks
        self._group, self._is_whole = 0, False
        """The KV cache group that is followed, and whether its layers need whole prefixes."""
        self._hashes: dict[_Hash, bytes] = {}
        """Hash of a block in vLLM -> its hash in Diptych."""
        self._is_recorded = False
        self._changes: dict[bytes, bool] = {}

    def take(self, payload: bytes) -> None:
        """Apply a batch of events. Raises `EventsError`."""
        try:
            events = _decoder.decode(payload).events
        except UNREADABLE as exc:
            raise EventsError(f"its KV events cannot be read: {exc}") from exc
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self.clear()

    def clear(self) -> None:
        """Forget all blocks: the core has none cached, or nothing is known of them."""
        for mine in self._hashes.values():
            self._change(mine, False)
        self._hashes.clear()

    def record_changes(self, wanted: bool) -> None:
        """See `RemembersPrefixes`."""
        self._is_recorded = wanted
        self._changes.clear()

    def remembered_hashes(self) -> list[bytes]:
        """See `RemembersPrefixes`."""
        return list(set(self._hashes.values()))

    def take_changes(self) -> dict[bytes, bool]:
        """See `RemembersPrefixes`."""
        changes, self._changes = self._changes, {}
        return changes

    def _change(self, mine: bytes, remembered: bool) -> None:
        """Record a change. If it undoes one that has not been reported yet, neither is reported."""
        if not self._is_recorded:
            return
        if self._changes.get(mine, remembered) != remembered:
            del self._changes[mine]
        else:
            self._changes[mine] = remembered

    def _store(self, event: BlockStored) -> None:
        """Record stored blocks. Those of another group, outside the device, or with
        an unknown beginning are left out. The group that is followed is the first one that needs
        whole prefixes; until one is known, it is the first group."""
        if event.medium not in ON_THE_DEVICE:
            return
        group = event.group_idx or 0
        if not self._is_whole and event.kv_cache_spec_kind in WHOLE:
            if group != self._group:
                self.clear()
            self._group, self._is_whole = group, True
        if group != self._group:
            return
        if event.block_size != self._block_size:
            raise EventsError(f"it has blocks of {event.block_size} and {self._block_size} tokens")
        if len(event.token_ids) != len(event.block_hashes) * self._block_size:
            num_tokens, num_blocks = len(event.token_ids), len(event.block_hashes)
            raise EventsError(f"{num_tokens} tokens are no {num_blocks} blocks")
        parent = self._parent_of(event)
        if parent is None:
            return
        chain = [parent]
        filler = [0] * self._block_size  # stands for the parent, whose hash is there already
        extend_block_hashes(chain, filler + event.token_ids, self._block_size, None)
        for theirs, mine in zip(event.block_hashes, chain[1:], strict=True):
            if theirs not in self._hashes:
                if len(self._hashes) >= self._max_blocks:
                    raise EventsError(f"it says to remember more than {self._max_blocks} blocks")
                self._hashes[theirs] = mine
                self._change(mine, True)

    def _parent_of(self, event: BlockStored) -> bytes | None:
        """Return the hash that precedes the first of its blocks; None if it is not known, or if the
        blocks depend on more than tokens, an adapter of the wire, and a salt."""
        name = event.lora_name
        named = [] if name is None else [name]
        first, *others = [keys or [] for keys in event.extra_keys or [named]]
        if first[: len(named)] != named or any(keys != named for keys in others):
            return None
        [salt, *more] = [*first[len(named) :], None]
        if event.parent_block_hash is not None:
            return None if more else self._hashes.get(event.parent_block_hash)
        if more[1:] or not isinstance(salt, str | None):
            return None
        adapter, by_digest, digest = (name or "").rpartition(BY_DIGEST)
        if name is None:
            return root_hash(salted(salt))
        return root_hash(adapted(salt, adapter, digest)) if by_digest else None

    def _remove(self, event: BlockRemoved) -> None:
        if event.medium not in ON_THE_DEVICE or (event.group_idx or 0) != self._group:
            return
        for theirs in event.block_hashes:
            mine = self._hashes.pop(theirs, None)
            if mine is not None:
                self._change(mine, False)
