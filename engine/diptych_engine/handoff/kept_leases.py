"""The open leases of a core, which outlive it with their blocks.

Each granted lease has a file, under its id, from when its blocks are sealed until it ends:

    checksum    of what follows
    record      the lease's epoch, digest and end, and what was sealed of each of its blocks

A block without a seal, such as one that is not full, has its checksum here alone. The next core
goes on with the leases all of whose blocks are right. Their time begins anew, because readers may
have renewed them. A file is removed before its blocks may contain anything else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Container
from pathlib import Path
from typing import Annotated, Final

import msgspec

from diptych_kernels.made_once import clear
from diptych_kv_transfer import LeftLease
from diptych_protocol import UNREADABLE, KVTransferParams
from diptych_protocol.kv_transfer_params import BlockId, Name

log = logging.getLogger(__name__)

NAME: Final = re.compile("[0-9a-f]{32}")
SUM_BYTES: Final = 4
LONGEST_S: Final = 3600.0
"""How long after its reference has expired a lease may be adopted, if its readers renew it."""
Unsigned = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Found = tuple[bytes, Unsigned, Unsigned]
"""What a seal says of a block: hash, group, checksum."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What the next core is told of a lease."""

    epoch: Name
    digest: Name
    expires_at: float
    block_ids: list[BlockId]
    seals: list[Found] = []


class KeptLeases:
    """The records of one core, whose thread calls everything."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unwritten: dict[str, Record] = {}
        """By the leases' ids."""

    def take(self, num_blocks: int, is_right: Callable[[int, Found], bool]) -> list[LeftLease]:
        """Return what the last core has left, and is right; nothing else stays. is_right: whether a
        block is as a seal says."""
        left = []
        for lease_id in os.listdir(self._folder):
            record = self._read(lease_id)
            if record is None or not _is_whole(record, num_blocks, is_right):
                self._remove(lease_id)
            else:
                left.append(LeftLease(lease_id, record.epoch, record.digest, record.block_ids))
        return left

    def _read(self, lease_id: str) -> Record | None:
        path = self._folder / lease_id
        if not NAME.fullmatch(lease_id) or path.is_symlink() or not path.is_file():
            return None
        try:
            content = path.read_bytes()
            if content[:SUM_BYTES] != _sum(lease_id, content[SUM_BYTES:]):
                return None
            return msgspec.msgpack.decode(content[SUM_BYTES:], type=Record)
        except (OSError, *UNREADABLE):
            return None

    def clear(self) -> None:
        """Leave nothing."""
        for lease_id in os.listdir(self._folder):
            self._remove(lease_id)

    def granted(self, params: KVTransferParams) -> None:
        """Have the next core go on with a lease, when its blocks are sealed."""
        [block_ids] = params.remote_block_ids or [[]]
        self._unwritten[params.lease_id or ""] = Record(
            params.epoch or "", params.tokens_digest or "", params.expires_at or 0, block_ids
        )

    def ended(self, lease_id: str) -> None:
        """A lease has ended; call before anybody may write to its blocks. Others draw the ids of
        prefixes, which are never granted here."""
        if self._unwritten.pop(lease_id, None) is None and NAME.fullmatch(lease_id):
            self._remove(lease_id)

    def write(self, unsealed: Container[int], seal_of: Callable[[int, Found], Found]) -> None:
        """Write the records of the leases none of whose blocks is to be sealed yet. seal_of:
        returns a block's seal, or else the second argument with a checksum."""
        for lease_id, record in list(self._unwritten.items()):
            if any(block in unsealed for block in record.block_ids):
                continue
            del self._unwritten[lease_id]
            digest = bytes.fromhex(record.digest)
            seals = [
                seal_of(block, (digest, place, 0)) for place, block in enumerate(record.block_ids)
            ]
            content = msgspec.msgpack.encode(msgspec.structs.replace(record, seals=seals))
            try:
                (self._folder / lease_id).write_bytes(_sum(lease_id, content) + content)
            except OSError as exc:  # there is no room; it ends with this core
                log.warning("lease %s will not outlive this engine: %s", lease_id, exc.strerror)
                self._remove(lease_id)

    def _remove(self, lease_id: str) -> None:
        with contextlib.suppress(OSError):
            clear(self._folder / lease_id)


def _is_whole(record: Record, num_blocks: int, is_right: Callable[[int, Found], bool]) -> bool:
    blocks = record.block_ids
    return (
        time.time() < record.expires_at + LONGEST_S
        and len(blocks) == len(record.seals)
        and all(block < num_blocks for block in blocks)
        and all(map(is_right, blocks, record.seals))
    )


def _sum(lease_id: str, content: bytes) -> bytes:
    return zlib.crc32(content, zlib.crc32(lease_id.encode())).to_bytes(SUM_BYTES, "little")
