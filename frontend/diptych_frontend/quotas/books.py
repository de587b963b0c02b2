"""Keeps the ledger in a folder that several routers may share, and writes each day's usage there.

    ledger.json        what was used and what is reserved; replaced under the lock of `lock`
    ROUTER.runs        that router holds the lock of this file as long as it runs
    2026-11-28.jsonl   what each key used on that day, signed; with a suffix what it used later on,
                       if a wrong clock had ended the day too early

The locks are those of `flock`, which the system frees when a process ends, in any way. All methods
block on the disk. Without a folder the ledger is in memory, and there are no files of days.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from diptych_frontend.quotas.ledger import Bill, Count, DayOfKey, Grant, Ledger, Limits
from diptych_protocol import UNREADABLE, InvalidRequestError

log = logging.getLogger(__name__)

_DECODER: Final = msgspec.json.Decoder(Ledger)
_LINE: Final = msgspec.json.Decoder(DayOfKey)
_SIGNATURE: Final = b',"signature":"'


class Wish(NamedTuple):
    """Tokens to reserve for a request."""

    key: str
    tokens: int
    limits: Limits


class Books:
    """The ledger, for one router. One thread at a time."""

    def __init__(self, folder: Path | None, signing_key: Callable[[], bytes] = bytes) -> None:
        """signing_key: for the lines of a day; if it is empty they are not signed. Raises
        `InvalidRequestError` if the folder cannot be written to."""
        self.ledger = Ledger()
        """As it was at the last `post`."""
        self.folder, self._signing_key = folder, signing_key
        self._router = secrets.token_hex(8)
        self._closing = contextlib.ExitStack()
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(folder):
                for other in folder.glob("*.runs"):
                    self._runs(other.stem)
                runs = self._closing.enter_context(_opened(folder / f"{self._router}.runs"))
                fcntl.flock(runs, fcntl.LOCK_EX)
                ledger, _ = _read(folder / "ledger.json")
                for count in ledger.counts.values():
                    self._forget_gone(count)
                _replace(folder / "ledger.json", msgspec.json.encode(ledger))
        except OSError as exc:
            raise InvalidRequestError(f"usage cannot be kept in {folder}: {exc}") from exc

    def close(self) -> None:
        """Leave what is reserved to others."""
        self._closing.close()

    def post(self, ended: Sequence[Bill], wishes: Sequence[Wish], now: float) -> list[Grant]:
        """Enter requests that have ended, then those that want to begin. Raises `OSError`; then
        nothing was entered."""
        if self.folder is None:
            return self._entered(self.ledger, ended, wishes, now)
        with _locked(self.folder):
            ledger, before = _read(self.folder / "ledger.json")
            self._write_day(self.folder, ledger.begin_day(now))
            grants = self._entered(ledger, ended, wishes, now)
            after = msgspec.json.encode(ledger)
            if after != before:
                _replace(self.folder / "ledger.json", after)
        self.ledger = ledger
        return grants

    def _entered(
        self, ledger: Ledger, ended: Sequence[Bill], wishes: Sequence[Wish], now: float
    ) -> list[Grant]:
        for bill in ended:
            ledger.of(bill.key).settle(bill, self._router, now)
        grants = []
        for wish in wishes:
            grant = ledger.reserve(*wish, self._router, now)
            if grant.lacking and self._forget_gone(ledger.of(wish.key)):
                grant = ledger.reserve(*wish, self._router, now)
            grants.append(grant)
        return grants

    def _forget_gone(self, count: Count) -> bool:
        """Give back what is reserved for routers that have ended; False if there is nothing."""
        gone = {r for r in count.held if r != self._router and not self._runs(r)}
        for router in gone:
            count.forget(router)
        return bool(gone)

    def _runs(self, router: str) -> bool:
        """Whether another router with the same folder has not ended."""
        if self.folder is None:
            return False
        try:
            with _opened(self.folder / f"{router}.runs", os.O_RDWR) as descriptor:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        (self.folder / f"{router}.runs").unlink(missing_ok=True)
        return False

    def _write_day(self, folder: Path, lines: list[DayOfKey]) -> None:
        if lines:
            key = self._signing_key()
            content = b"".join(signed(line, key) for line in lines)
            path = folder / f"{lines[0].day}.jsonl"
            if path.exists() and path.read_bytes() != content:
                path = path.with_suffix(f".{secrets.token_hex(4)}.jsonl")
            _replace(path, content)


def signed(line: DayOfKey, key: bytes) -> bytes:
    """Return a line of a day's file, with a signature if there is a key: HMAC-SHA256 of the line
    without it."""
    text = msgspec.json.encode(line)
    if key:
        text = text[:-1] + _SIGNATURE + _signature(text, key) + b'"}'
    return text + b"\n"


def verified(content: bytes, key: bytes) -> list[DayOfKey]:
    """Return the lines of a day's file. Raises `InvalidRequestError` if they are not all there, as
    they were signed."""
    lines: list[DayOfKey] = []
    for number, text in enumerate(content.splitlines(), 1):
        body, _, signature = text.partition(_SIGNATURE)
        if not hmac.compare_digest(_signature(body + b"}", key), signature.removesuffix(b'"}')):
            raise InvalidRequestError(f"the signature of line {number} is wrong, or missing")
        try:
            lines.append(_LINE.decode(body + b"}"))
        except UNREADABLE as exc:
            raise InvalidRequestError(f"line {number} cannot be read: {exc}") from exc
    places = [(number, len(lines)) for number in range(1, len(lines) + 1)]
    found = [(line.line, line.lines) for line in lines]
    if len({line.day for line in lines}) != 1 or found != places:
        raise InvalidRequestError("lines are missing, or not in their order")
    return lines


def _signature(text: bytes, key: bytes) -> bytes:
    return hmac.new(key, text, hashlib.sha256).hexdigest().encode()


def _read(path: Path) -> tuple[Ledger, bytes]:
    content = path.read_bytes() if path.exists() else b"{}"
    try:
        return _DECODER.decode(content), content
    except UNREADABLE as exc:
        log.error("%s cannot be read (%s): usage counts anew", path, exc)
        _replace(path.with_suffix(".unreadable"), content)
        return Ledger(), content


@contextlib.contextmanager
def _opened(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with _opened(folder / "lock") as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _replace(path: Path, content: bytes) -> None:
    """Write a file completely or not at all, even if the machine stops."""
    new = path.with_name(f"{path.name}.new")
    with _opened(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.fsync(descriptor)
    os.replace(new, path)
