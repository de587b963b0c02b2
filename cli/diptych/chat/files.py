"""The files of a chat: images to send, saved conversations, and the history of lines."""

from __future__ import annotations

import base64
import mimetypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from diptych.chat.conversation import Message
from diptych_frontend.images.decoding import MAX_IMAGE_BYTES, decoded
from diptych_protocol import UNREADABLE, InvalidRequestError

MAX_SAVED_BYTES: Final = 64 << 20
MAX_HISTORY_BYTES: Final = 256 << 10
"""A longer history loses its older half when a chat begins."""


class FileError(Exception):
    """A file cannot be used; `str()` is one line for the user."""


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[dict[str, Any]], Meta(max_length=64)]


class _Chat(msgspec.Struct, forbid_unknown_fields=True):
    messages: Annotated[list[_Saved], Meta(max_length=100_000)]


def named(text: str) -> Path:
    """Return the path that a user wrote. Raises `FileError` for one that no file can have."""
    try:
        path = Path(text).expanduser()
    except RuntimeError as exc:
        raise FileError(f"{text}: {exc}") from exc
    if "\0" in text:
        raise FileError("a file's name has no NUL")
    return path


def image_url(path: Path) -> str:
    """Read an image into a data URL. Raises `FileError` for one that no model here would take."""
    found = _read(path, MAX_IMAGE_BYTES)
    try:
        decoded(found, str(path))
    except InvalidRequestError as exc:
        raise FileError(str(exc)) from exc
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(found).decode()}"


def save(path: Path, messages: Sequence[Message]) -> None:
    """Write a new file that only its owner can read. Raises `FileError`."""
    text = msgspec.json.format(msgspec.json.encode({"messages": list(messages)}), indent=2)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text + b"\n")
    except FileExistsError:
        raise FileError(f"{path} exists already; choose another name") from None
    except OSError as exc:
        raise FileError(f"{path} cannot be written: {exc.strerror or exc}") from exc


def load(path: Path) -> list[Message]:
    """Return the messages of a saved chat. Raises `FileError` for anything else."""
    try:
        chat = msgspec.json.decode(_read(path, MAX_SAVED_BYTES), type=_Chat)
    except UNREADABLE as exc:
        raise FileError(f"{path} is no saved chat: {exc}") from exc
    for number, message in enumerate(chat.messages):
        if message.role == "system" and (number or not isinstance(message.content, str)):
            where = f"$.messages[{number}]"
            raise FileError(f"{path} is no saved chat: {where} may not be a system message")
    return [{"role": each.role, "content": each.content} for each in chat.messages]


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            found = file.read(most + 1)
    except OSError as exc:
        raise FileError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    if len(found) > most:
        raise FileError(f"{path} has more than {most} bytes, the most that is taken")
    return found


def history_path() -> Path:
    """Return the path of the history: in the folder for state of the XDG Base Directories."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return folder / "diptych" / "chat_history"


def prepare_history(path: Path) -> bool:
    """Create the file if necessary, readable for its owner only, and shorten it. False if that
    fails."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            os.fchmod(file.fileno(), 0o600)
            lines = file.read()
            if len(lines) > MAX_HISTORY_BYTES:
                file.seek(0)
                file.write(newer_half(lines))
                file.truncate()
    except OSError:
        return False
    return True


def newer_half(lines: bytes) -> bytes:
    """Return the newer entries of a history. An entry begins with a line that begins with #."""
    newer = lines[-(MAX_HISTORY_BYTES // 2) :]
    return newer[newer.find(b"\n#") + 1 :]
