"""The answers of one batch so far, in a file that the process which runs the batch locks.

Each line is a sign (`+` for the output file, `-` for the error file) and a line of that file. A
request is done when its line is on the disk. A line that a crash cut off is dropped, and its
request is repeated.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

import msgspec

from diptych_frontend.batches_api.api_types import BatchUsage, InputDetails, OutputDetails
from diptych_protocol import UNREADABLE

DONE: Final = b"+"
ERROR: Final = b"-"


class _Usage(msgspec.Struct):
    """That of any route: chats and completions have one kind of names, responses the other."""

    total_tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: InputDetails | None = None
    completion_tokens_details: OutputDetails | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: InputDetails | None = None
    output_tokens_details: OutputDetails | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body | None = None


class Told(msgspec.Struct):
    """The counts in a line of an output or error file."""

    custom_id: str
    response: _Response | None = None


_DECODER: Final = msgspec.json.Decoder(Told)


class Journal:
    """One process at a time opens a journal. Its methods block on the disk."""

    def __init__(self, descriptor: int) -> None:
        """Read the existing lines. `close` closes the descriptor, whose lock is held."""
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._appending = threading.Lock()
        self.completed = 0
        self.failed = 0
        self.usage = BatchUsage()
        self.done: set[str] = set()
        """The custom ids of the requests that were answered."""
        self._cut(self._read())

    @classmethod
    def claim(cls, path: Path) -> Self | None:
        """Open or create the journal; None if another process runs the batch.

        The lock is one of `flock`, which the system frees when the process ends, in any way.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Unlock the batch for other processes."""
        with self._appending:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def append(self, sign: bytes, result: bytes) -> None:
        """Add an answer. Raises `OSError` if the disk is full; then nothing was added."""
        entry = sign + result + b"\n"
        told = _DECODER.decode(result)
        with self._appending:
            written = 0
            while written < len(entry):
                rest = memoryview(entry)[written:]
                written += os.pwrite(self._descriptor, rest, self._size + written)
            self._size += len(entry)
            self._count(sign, told)

    def parts(self, sign: bytes) -> Iterator[bytes]:
        """Yield the content of the output file or of the error file. One reader at a time."""
        for entry in self._entries():
            if entry.startswith(sign):
                yield entry[1:]

    def _count(self, sign: bytes, told: Told) -> None:
        self.done.add(told.custom_id)
        self.usage = added(self.usage, told)
        if sign == DONE:
            self.completed += 1
        else:
            self.failed += 1

    def _read(self) -> int:
        """Count what is there; the size of what is whole."""
        size = 0
        for entry in self._entries():
            if not entry.endswith(b"\n"):
                break
            try:
                told = _DECODER.decode(entry[1:])
            except UNREADABLE:
                break  # the machine stopped while this was written
            self._count(entry[:1], told)
            size += len(entry)
        return size

    def _cut(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)
        self._size = size

    def _entries(self) -> Iterator[bytes]:
        """What is there now, not what is added meanwhile."""
        left = self._size
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        with open(self._descriptor, "rb", closefd=False) as file:
            for entry in file:
                left -= len(entry)
                if left < 0:
                    return
                yield entry


def added(sum_so_far: BatchUsage, told: Told) -> BatchUsage:
    """Return the sum with one more answer."""
    body = None if told.response is None else told.response.body
    if body is None or body.usage is None:
        return sum_so_far
    usage = body.usage
    inputs = usage.prompt_tokens_details or usage.input_tokens_details or InputDetails()
    outputs = usage.completion_tokens_details or usage.output_tokens_details or OutputDetails()
    cached = sum_so_far.input_tokens_details.cached_tokens + inputs.cached_tokens
    reasoning = sum_so_far.output_tokens_details.reasoning_tokens + outputs.reasoning_tokens
    return BatchUsage(
        sum_so_far.input_tokens + usage.prompt_tokens + usage.input_tokens,
        InputDetails(cached),
        sum_so_far.output_tokens + usage.completion_tokens + usage.output_tokens,
        OutputDetails(reasoning),
        sum_so_far.total_tokens + usage.total_tokens,
    )
