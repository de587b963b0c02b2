"""KV blocks in files of the user's cache directory, which outlive the engine that wrote them.

    block ... block     the KV of one block, a part for each rank
    seal                SHA-256 of the file's name and of what precedes

A file's name says what its bytes depend on: a recipe, and the hash of the block's tokens. So what
is torn, damaged, of another model, or under another block's name has no valid seal.

An engine has a folder of its own, the first that no other engine has locked. So each file has one
owner, and the next engine on the machine finds what the last one left.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from diptych_kernels.made_once import PART, clear, is_private, try_lock

MAX_FOLDERS: Final = 64
"""Engines of one user on one machine that may keep blocks."""
NAME: Final = re.compile("[0-9a-f]{32}-[0-9a-f]{32}")
SEAL_BYTES: Final = hashlib.sha256().digest_size
SAFELY: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Through no link, and without waiting for the other end of a FIFO."""


class BlockFiles:
    """The files of one engine. `write`, `read` and `remove` are for any thread, the rest for its
    core's."""

    def __init__(self, parent: Path, max_bytes: int, recipe: bytes) -> None:
        """Take a folder below `parent`.

        max_bytes: the most that all files have together; those that were used last stay. recipe:
        names everything besides tokens that KV depends on. Raises `OSError` if there can be no
        folder, or others may write to it.
        """
        self._max_bytes, self._recipe = max_bytes, hashlib.sha256(recipe).hexdigest()[:32]
        self._parent = parent
        self.folder, self._lock = take_folder(parent)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """What is there, in the order of use."""
        self.num_bytes = 0
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    found.append((status.st_mtime_ns, entry.name, status.st_size))
                else:  # a part, or no file of ours
                    self.remove([entry.name])
        for _, name, size in sorted(found):
            self.remove(self.add(name, size))

    def __len__(self) -> int:
        return len(self._sizes)

    def name(self, block_hash: bytes) -> str:
        """Return the name of a block's file."""
        return f"{self._recipe}-{block_hash.hex()}"

    def hash_of(self, name: str) -> bytes | None:
        """Return which block a file is for; None if it is another recipe's."""
        recipe, _, block_hash = name.partition("-")
        return bytes.fromhex(block_hash) if recipe == self._recipe else None

    def hashes(self) -> list[bytes]:
        """Return the hashes of all blocks that can be read."""
        return [found for name in self._sizes if (found := self.hash_of(name)) is not None]

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def use(self, names: Iterable[str]) -> None:
        """Record that a prefix was used, as far as it is there. Its end is removed first, because
        it is worth nothing without its beginning."""
        for name in reversed([*names]):
            if name in self._sizes:
                self._sizes.move_to_end(name)

    def add(self, name: str, size: int) -> list[str]:
        """Record a whole file. Returns those to remove for it."""
        self.num_bytes += size - self._sizes.pop(name, 0)
        self._sizes[name] = size
        oldest = []
        while self.num_bytes > self._max_bytes:
            evicted, freed = self._sizes.popitem(last=False)
            self.num_bytes -= freed
            oldest.append(evicted)
        return oldest

    def drop(self, name: str) -> None:
        """Forget a file, which is not as it was written."""
        self.num_bytes -= self._sizes.pop(name, 0)

    def clear(self) -> list[str]:
        """Forget all files. Returns them, for `remove`."""
        names = list(self._sizes)
        self._sizes.clear()
        self.num_bytes = 0
        return names

    def close(self) -> None:
        """Leave the folder, and the order of use, to the next engine."""
        now = time.time_ns()
        for age, name in enumerate(self._sizes, now - len(self._sizes)):
            with contextlib.suppress(OSError):
                os.utime(self.folder / name, ns=(age, age), follow_symlinks=False)
        os.close(self._lock)

    def write(self, name: str, parts: Sequence[memoryview]) -> int:
        """Write a block whole or not at all; returns the bytes of its file. A folder in its place
        makes way, and one that is gone with all blocks is made anew. Raises `OSError`."""
        try:
            return self._write(name, parts)
        except IsADirectoryError:
            self.remove([name, f"{name}{PART}"])
        except FileNotFoundError:
            former = self._lock
            self.folder, self._lock = take_folder(self._parent)
            os.close(former)
        return self._write(name, parts)

    def _write(self, name: str, parts: Sequence[memoryview]) -> int:
        part = self.folder / f"{name}{PART}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | SAFELY
        content: list[memoryview | bytes] = [*parts, _seal(name, parts)]
        size = sum(map(len, content))
        handle = os.open(part, flags, 0o600)
        try:
            written = os.writev(handle, content)
            if written != size:
                raise OSError(f"{self.folder} took {written} of {size} bytes")
            part.rename(self.folder / name)
        except OSError:
            self.remove([part.name])
            raise
        finally:
            os.close(handle)
        return size

    def read(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Read a block. False: it is not there, or not as it was written; the parts then contain
        anything."""
        try:
            handle = os.open(self.folder / name, os.O_RDONLY | SAFELY)
        except OSError:
            return False
        try:
            seal = bytearray(SEAL_BYTES)
            size = sum(map(len, parts)) + SEAL_BYTES
            whole = os.fstat(handle).st_size == size
            whole = whole and os.preadv(handle, [*parts, seal], 0) == size
            if whole := whole and hmac.compare_digest(seal, _seal(name, parts)):
                os.utime(handle)  # it was used now
            return whole
        except OSError:
            return False
        finally:
            os.close(handle)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files. One that cannot be removed is found at the next start."""
        for name in names:
            with contextlib.suppress(OSError):
                clear(self.folder / name)


def _seal(name: str, parts: Sequence[memoryview]) -> bytes:
    digest = hashlib.sha256(name.encode())
    for part in parts:
        digest.update(part)
    return digest.digest()


def take_folder(parent: Path) -> tuple[Path, int]:
    """Return the first folder below `parent` that no other engine has locked, and the lock. What is
    no folder makes way. Raises `OSError`."""
    for number in range(MAX_FOLDERS):
        folder = parent / str(number)
        if folder.is_symlink() or not folder.is_dir():
            clear(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        if not is_private(os.fstat(lock)):
            os.close(lock)
            raise PermissionError(f"others may write to {folder}")
        if try_lock(lock):
            return folder, lock
        os.close(lock)
    raise OSError(f"{MAX_FOLDERS} engines use {parent} already")
