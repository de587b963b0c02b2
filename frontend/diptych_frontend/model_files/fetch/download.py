"""Downloads one file to the disk, in parts, several at a time, and continues an earlier attempt.

Parts are written in order, so the length of an unfinished file says what is complete, and a process
may be killed at any moment.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from diptych_frontend.model_files.fetch.source import (
    SHA256,
    URI,
    BadSourceError,
    Checksum,
    FetchError,
    RemoteFile,
    Source,
    UnreachableError,
)
from diptych_frontend.model_files.gguf_header import MAGIC, MAX_HEADER_BYTES, GGUFError, read_header

logger = logging.getLogger(__name__)
T = TypeVar("T")

PART_BYTES: Final = 16 << 20
PARTS_AT_A_TIME: Final = 6
"""The most parts in memory at a time. One connection is seldom as fast as the network."""
ATTEMPTS: Final = 6
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
HASH_CHUNK_BYTES: Final = 4 << 20

Advance = Callable[[int], None]
"""Called with the bytes by which the file has grown; negative if it was deleted."""


def download(source: Source, file: RemoteFile, path: Path, advance: Advance) -> str:
    """Fetch `file` to `path`, continuing what is there, verify it, and return its SHA-256.

    Raises `FetchError` if it differs from its checksum twice, or if the source fails permanently.
    """
    for _ in range(2):
        _fetch_missing(source, file, path, file.size, advance)
        digest = _digest(path, file.checksum) if file.checksum is not None else ""
        if file.checksum is None or digest == file.checksum.digest:
            known = file.checksum is not None and file.checksum.algorithm == "sha256"
            return digest if known else sha256_of(path)
        logger.warning("%s differs from its checksum and is thrown away", file.name)
        path.unlink()
        advance(-file.size)
    raise FetchError(
        f"{file.name} differs from its checksum twice; it is damaged on its way, or {SHA256} is "
        "that of another file"
    )


def is_as_listed(path: Path, file: RemoteFile) -> bool:
    """Whether there is a plain file with the size of `file`, and with its checksum if there is one.

    A file that could be changed under another name, through a link, is not plain.
    """
    try:
        found = path.lstat()
        plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        return (
            plain
            and found.st_size == file.size
            and (file.checksum is None or _digest(path, file.checksum) == file.checksum.digest)
        )
    except OSError:
        return False


def download_header(source: Source, file: RemoteFile, path: Path, advance: Advance) -> str:
    """Fetch only the header of a GGUF file: metadata and vocabulary, no weights.

    Its checksum cannot be verified without the rest. Returns the SHA-256 of what was fetched.
    """
    end = 0
    while end < min(file.size, MAX_HEADER_BYTES):
        end = min(file.size, max(PART_BYTES, 2 * end))
        _fetch_missing(source, file, path, end, advance)
        with path.open("rb") as start:
            if start.read(len(MAGIC)) != MAGIC:
                break
        try:
            read_header(path)
        except GGUFError:
            continue
        return sha256_of(path)
    path.unlink(missing_ok=True)
    raise BadSourceError(URI, f"{file.name} is not a usable GGUF file; name another")


def with_deadline(call: Callable[[], T], seconds: float) -> T:
    """Call once. Raises `UnreachableError` after so many seconds, whatever the network does: no
    client's time limit covers the look-up of a name."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as exc:
            answer.set_exception(exc)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise UnreachableError(f"there is no answer within {seconds:g} s") from None


def with_attempts(
    call: Callable[[], T], attempts: int = ATTEMPTS, *, given_up: threading.Event | None = None
) -> T:
    """Call until there is an answer, with growing pauses between attempts.

    After `given_up` is set there are no more attempts.
    """
    given_up = given_up or threading.Event()
    pause_s = FIRST_PAUSE_S
    for attempt in range(1, attempts + 1):
        try:
            return call()
        except UnreachableError as exc:
            if attempt == attempts or given_up.is_set():
                raise
            wait_s = max(exc.retry_after_s, pause_s * random.uniform(0.5, 1.0))
            logger.warning("%s; attempt %d of %d in %.0f s", exc, attempt + 1, attempts, wait_s)
            if given_up.wait(wait_s):
                raise
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    raise ValueError(f"{attempts} attempts are none")


def _fetch_missing(
    source: Source, file: RemoteFile, path: Path, end: int, advance: Advance
) -> None:
    """Append to `path` until it has `end` bytes."""
    with path.open("ab") as out:
        if out.tell() > file.size:
            out.truncate(0)
        for part in _parts(source, file, os.fstat(out.fileno()).st_size, end):
            out.write(part)
            out.flush()
            advance(len(part))


def _parts(source: Source, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
    """The parts between `start` and `end` in their order, some of them fetched ahead."""

    def fetch(at: int) -> bytes:
        return with_attempts(
            lambda: source.read(file, at, min(at + PART_BYTES, end)), given_up=given_up
        )

    given_up = threading.Event()
    pending: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(PARTS_AT_A_TIME, thread_name_prefix="part") as pool:
        try:
            for at in range(start, end, PART_BYTES):
                pending.append(pool.submit(fetch, at))
                if len(pending) == PARTS_AT_A_TIME:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)


def sha256_of(path: Path) -> str:
    """Return the hexadecimal digest of the whole file. Raises `OSError`."""
    return _hashed(path, hashlib.sha256())


def _digest(path: Path, checksum: Checksum) -> str:
    if checksum.algorithm == "sha256":
        return sha256_of(path)
    header = f"blob {path.stat().st_size}\0".encode()
    return _hashed(path, hashlib.sha1(header, usedforsecurity=False))


def _hashed(path: Path, digest: hashlib._Hash) -> str:
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
