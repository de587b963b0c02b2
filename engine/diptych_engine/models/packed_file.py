"""Files of packed matrices, in the node's cache of a service's pods or in the user's cache
directory. The engines of a machine map them, so that a model is packed once, and is in memory once.

    matrix, matrix, ...     each at a multiple of 64 bytes
    index                   `_Index` in msgpack
    tail                    seal of the index (HMAC-SHA-256), and its length

A file is named for all that its bytes depend on, and written by one rename. A file that is damaged,
or that others may have written, is not used but written anew. Pods of all tenants are one user, so
a node's file is sealed with a key that only the service's pods have.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import math
import mmap
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from diptych_engine.models.packed import PackedMatrix
from diptych_frontend.core_client.curve import read_keys
from diptych_kernels.made_once import (
    DONE,
    NODE_FOLDER,
    PART,
    is_private,
    locked,
    remove_unused,
    stamp_of,
    use,
    user_folder,
    whole,
)
from diptych_kernels.native import tile_layout
from diptych_kernels.packed_product import FLOATS, reference
from diptych_protocol import UNREADABLE

log = logging.getLogger(__name__)

Matrices = Mapping[str, PackedMatrix]
"""By the name of the first published tensor in each."""

ALIGNMENT: Final = 64
DTYPES: Final = {str(own).removeprefix("torch."): own for own in (torch.uint8, *FLOATS)}
"""The types of tiles by their names."""
TAIL: Final = hashlib.sha256().digest_size + 8
THREADS: Final = 2
PACKING_TIMEOUT_S: Final = 600.0
"""Nobody waits longer for another process that packs."""
LOCK: Final = ".lock"
KEPT_FILES: Final = 16
KEPT_BYTES: Final = 64 << 30
"""Most files, and bytes of files, that are kept: those that were used last, and are used now."""
OF_NETWORKS: Final = ("nfs", "cifs", "smb", "fuse", "ceph", "lustre", "gpfs", "afs")
"""How the names of file systems begin on which another machine may remove a file that is mapped
here, whose next reader gets SIGBUS."""
READERS: Final = (
    "groups.py", "loader.py", "packed.py", "rounding.py", "stored_parts.py",
    "quantised_tensors.py",
)  # fmt: skip
"""The modules beside this one that decide what is packed."""
MOUNTS: Final = Path("/proc/self/mountinfo")
KEYS_FOLDER: Final = "DIPTYCH_KEYS_DIR"


class FilePlace(NamedTuple):
    """Where a file is, or may be made."""

    path: Path
    key: bytes
    """Seals it; empty where only this user writes."""


class _Place(msgspec.Struct, frozen=True):
    start: int
    shape: tuple[int, int, int]
    dtype: str
    digest: bytes
    """SHA-256 of the tiles."""


class _Index(msgspec.Struct, frozen=True):
    name: str
    """The file's own."""
    matrices: dict[str, _Place]


def places_for(sources: Iterable[Path], recipe: object) -> list[FilePlace]:
    """Return the places for the packed matrices of a model's files, the best first.

    recipe: all else that decides what is in them; its `repr` is the same in every process. Raises
    `InvalidRequestError` for unreadable keys.
    """
    digest = hashlib.sha256(repr(recipe).encode() + stamp_of(sources))
    folder = Path(__file__).parent
    makers = map(Path, (reference.__file__, tile_layout.__file__, __file__))
    for maker in (*makers, *(folder / name for name in READERS)):
        digest.update(maker.read_bytes())
    places = [FilePlace(user_folder("weights") / f"{digest.hexdigest()[:32]}.packed", b"")]
    node, keys = os.environ.get(NODE_FOLDER), os.environ.get(KEYS_FOLDER)
    if node and keys:
        secret = read_keys(Path(keys)).secret.encode()
        key = hashlib.blake2b(secret, person=b"diptych weights").digest()
        digest.update(key)  # services of a namespace have files of their own
        places.insert(0, FilePlace(Path(node) / f"{digest.hexdigest()[:32]}.packed", key))
    return places


def shared_matrices(
    path: Path,
    num_bytes: int,
    make: Callable[[], Iterable[tuple[str, PackedMatrix]]],
    key: bytes = b"",
) -> Matrices | None:
    """Map the matrices of a file, which is written first if it is not there. They stay valid when
    the file is removed.

    num_bytes: about how many it needs. make: packs all of them. key: see `FilePlace`. None if files
    cannot be kept here, or are not safe here; `make` may have been called.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(path.parent.lstat()):
            raise PermissionError(f"others may write to {path.parent}")
        kind = kind_of_file_system(MOUNTS.read_text(), path.parent.stat().st_dev)
        if kind.startswith(OF_NETWORKS):
            raise OSError(f"{path.parent} is on a network ({kind})")
        found = _mapped(path, key)
        if found is None:
            with locked(path.with_suffix(LOCK), time.monotonic() + PACKING_TIMEOUT_S):
                found = _mapped(path, key) or _written(path, num_bytes, make, key)
    except (OSError, RuntimeError) as exc:  # RuntimeError: the user has no home
        log.warning("packed weights are not shared with other engines: %s", exc)
        return None
    return found


def kind_of_file_system(mounts: str, device: int) -> str:
    """Return what `mountinfo` calls a device's file system; empty if it has no such device."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for mount, _, system in (line.partition(" - ") for line in mounts.splitlines()):
        if mount.split()[2] == number:
            return system.split()[0]
    return ""


def _written(
    path: Path, num_bytes: int, make: Callable[[], Iterable[tuple[str, PackedMatrix]]], key: bytes
) -> Matrices | None:
    _forget_oldest(path, num_bytes)
    free = shutil.disk_usage(path.parent).free
    if free < 2 * num_bytes:
        raise OSError(f"{path.parent} has {free >> 20} MB free, {2 * num_bytes >> 20} are wanted")
    places = {}
    with whole(path, 0o600) as file:
        for name, matrix in make():
            places[name] = _write(file, matrix.tiles)
        index = msgspec.msgpack.encode(_Index(path.name, places))
        file.write(index + hmac.digest(key, index, "sha256") + len(index).to_bytes(8, "little"))
    return _mapped(path, key)


def _write(file: BinaryIO, tiles: Tensor) -> _Place:
    file.write(bytes(-file.tell() % ALIGNMENT))
    start, content = file.tell(), tiles.view(torch.uint8).numpy().reshape(-1).data
    file.write(content)
    rows, groups, size = tiles.shape
    dtype = next(name for name, own in DTYPES.items() if own is tiles.dtype)
    return _Place(start, (rows, groups, size), dtype, hashlib.sha256(content).digest())


def _forget_oldest(newest: Path, num_bytes: int) -> None:
    """Remove what no engine uses: files beyond the limits, of which there will be one more, parts
    of files, and what says that others are there."""
    files = []
    for path in newest.parent.iterdir():
        if path == newest or path.suffix == LOCK:
            continue
        with contextlib.suppress(FileNotFoundError):  # another engine does the same
            files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
    total = num_bytes
    for number, (_, size, path) in enumerate(sorted(files, reverse=True), start=1):
        total += size
        if path.suffix in (PART, DONE) or number >= KEPT_FILES or total > KEPT_BYTES:
            remove_unused(path)


def _mapped(path: Path, key: bytes) -> Matrices | None:
    """The matrices of a file; None if there is no such file, or it cannot be trusted."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # there is none, or it is a link
        return None
    try:
        found = os.fstat(handle)
        if not is_private(found) or not stat.S_ISREG(found.st_mode):
            log.warning("%s is not used: others may have written it", path)
            return None
        if found.st_size < TAIL:
            return None
        use(handle)
        # Private, because torch knows no memory that cannot be written. Nobody writes it.
        pages = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
        with contextlib.suppress(OSError):  # it is mounted read-only
            os.utime(handle)  # it was used now
    finally:
        os.close(handle)
    matrices = _checked(pages, path.name, key)
    if matrices is None:
        log.warning("%s is damaged", path)
    return matrices


def _checked(pages: mmap.mmap, name: str, key: bytes) -> Matrices | None:
    """The matrices, if everything is as it was written. All pages are read for it, once."""
    end = len(pages) - TAIL
    seal, length = pages[end:-8], int.from_bytes(pages[-8:], "little")
    index = pages[max(0, end - length) : end]
    if not hmac.compare_digest(hmac.digest(key, index, "sha256"), seal):
        return None
    try:
        found = msgspec.msgpack.decode(index, type=_Index)
    except UNREADABLE:
        return None
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    tiles = {}
    for first, place in found.matrices.items():
        dtype = DTYPES.get(place.dtype)
        last = place.start + math.prod(place.shape) * (1 if dtype is None else dtype.itemsize)
        if found.name != name or dtype is None or not 0 <= place.start <= last <= end:
            return None
        tiles[first] = memory[place.start : last].view(dtype).view(place.shape)
    with ThreadPoolExecutor(THREADS) as pool:
        raw = (each.view(torch.uint8).numpy() for each in tiles.values())
        digests = pool.map(lambda each: hashlib.sha256(each).digest(), raw)
        if list(digests) != [place.digest for place in found.matrices.values()]:
            return None
    return {first: PackedMatrix(own) for first, own in tiles.items()}
