"""Questions and answers between two processes over a socket. Either side may ask."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Final

log = logging.getLogger(__name__)

MAX_BYTES: Final = 64 << 20
_HEAD: Final = struct.Struct(">BII")
"""Kind, number of the question, length of what follows in bytes."""
_QUESTION, _ANSWER, _FAILURE = range(3)

AnswerTo = Callable[[bytes], Awaitable[bytes]]


class ChannelError(Exception):
    """The other side could not answer, or is gone."""


class Channel:
    """One end. `run` reads what comes, until the other end is closed."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer_to: AnswerTo
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._answer_to = answer_to
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    async def over(cls, end: socket.socket, answer_to: AnswerTo) -> Channel:
        """`end`: of a socketpair; it then belongs to the channel. `answer_to` answers the other
        side's questions; what it raises is logged here, and raised there as `ChannelError`."""
        return cls(*await asyncio.open_unix_connection(sock=end), answer_to)

    async def ask(self, question: bytes, timeout_s: float) -> bytes:
        """The answer. Raises `ChannelError`, and `TimeoutError` if none comes in time."""
        if self._closed:
            raise ChannelError("the other process is gone")
        number = next(self._numbers) % (1 << 32)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._send(_QUESTION, number, question)
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            del self._asked[number]

    async def run(self) -> None:
        """Returns when the other side is gone."""
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    head = await self._reader.readexactly(_HEAD.size)
                    kind, number, length = _HEAD.unpack(head)
                    if length > MAX_BYTES:
                        raise ChannelError(f"a message of {length} bytes: at most {MAX_BYTES}")
                    self._take(kind, number, await self._reader.readexactly(length))
        finally:
            self.close()

    def close(self) -> None:
        """Fail whoever waits for an answer. Safe to call twice."""
        self._closed = True
        self._writer.close()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ChannelError("the other process is gone"))
        for task in self._answering:
            task.cancel()

    def _send(self, kind: int, number: int, content: bytes) -> None:
        if not self._closed:
            self._writer.write(_HEAD.pack(kind, number, len(content)) + content)

    def _take(self, kind: int, number: int, content: bytes) -> None:
        if kind == _QUESTION:
            task = asyncio.create_task(self._answer(number, content))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        answer = self._asked.get(number)
        if answer is None or answer.done():
            return  # who asked has stopped waiting
        if kind == _ANSWER:
            answer.set_result(content)
        else:
            answer.set_exception(ChannelError(content.decode(errors="replace")))

    async def _answer(self, number: int, question: bytes) -> None:
        try:
            self._send(_ANSWER, number, await self._answer_to(question))
        except Exception as exc:
            log.exception("a question of the other process could not be answered")
            self._send(_FAILURE, number, (str(exc) or type(exc).__name__).encode())
