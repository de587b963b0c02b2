"""Threads for what would hold up the event loop: large bodies, grammars, and waiting for processes.

A thread helps only if what it runs lets go of the GIL. Tokenising and compiling grammars do, Python
code does every `SWITCH_INTERVAL_S` (`server.py`), and for decoding JSON, which does not, there is a
bound on how many values a body may have (`request_body.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from starlette.types import Scope

from diptych_frontend.confined.cancellation import Cancellation, cancelled_by
from diptych_frontend.confined.haste import NotAtOnceError, hurried
from diptych_frontend.openai.asgi import client_of
from diptych_frontend.openai.turns import Turns
from diptych_protocol import EngineOverloadedError

T = TypeVar("T")

INLINE_BYTES: Final = 2 << 10
"""Bodies up to this size are dealt with on the event loop, which takes at most a few milliseconds:
quicker than a hop to a thread and back."""
THREADS: Final = 2
"""Each lane has so many. One client has one of them at a time: it holds up no others, and takes one
processor."""
MAX_WAITING_BYTES: Final = 64 << 20
"""Half of it may be one client's."""
TURN_TIMEOUT_S: Final = 30.0
"""A request that waited and worked so long is refused: its client has others to ask."""


@dataclass(slots=True)
class _Task:
    work: Callable[[], Any]
    done: asyncio.Future[Any]
    cancellation: Cancellation = field(default_factory=Cancellation)

    def run(self) -> Any:
        """Do the work; where it waits for a process, until it is cancelled."""
        with cancelled_by(self.cancellation):
            return self.work()


class RequestWorkers:
    """Runs work for clients by turns: texts in one lane and images in another, so that no text
    waits behind an image. The threads start with the first work, and end when nobody has this
    object any longer."""

    def __init__(self) -> None:
        self._texts, self._images = _Lane("requests"), _Lane("images")

    async def run(
        self, scope: Scope, size: int, work: Callable[[], T], *, has_images: bool = False
    ) -> T:
        """What `work` returns or raises, once it is the turn of the request's client.

        `size` is what the work keeps in memory while it waits, in bytes. Raises
        `EngineOverloadedError` if too much waits already, or it takes too long. Whoever is
        cancelled here, or waits for too long, ends the work as well (`confined.cancellation`).
        """
        return await (self._images if has_images else self._texts).run(scope, size, work)

    async def small(self, scope: Scope, size: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises: here, if it takes no longer than the event loop can wait;
        else it is done again from its beginning, as by `run`."""
        try:
            with hurried():
                return work()
        except NotAtOnceError:
            return await self.run(scope, size, work)

    async def read(
        self, scope: Scope, body: bytes, work: Callable[[], T], image_word: bytes | None = None
    ) -> T:
        """What `work` makes of a body: at once if the body is small, else by `run`.

        image_word: bodies with images have this word, and images make much work of a small body.
        """
        # An escaped letter might hide the word.
        may_see = image_word is not None and (image_word in body or b"\\u" in body)
        if len(body) <= INLINE_BYTES and not may_see:
            return await self.small(scope, len(body), work)
        return await self.run(scope, len(body), work, has_images=may_see)


class _Lane:
    """A queue with threads of its own."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix=name)
        self._turns: Turns[_Task] = Turns(MAX_WAITING_BYTES)
        self._working: set[str] = set()
        """Clients for whom a thread works."""

    async def run(self, scope: Scope, size: int, work: Callable[[], T]) -> T:
        """See `RequestWorkers.run`."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        task = _Task(work, done)
        self._turns.put(client_of(scope), task, size)
        self._start_next()
        try:
            async with asyncio.timeout(TURN_TIMEOUT_S):
                return await done
        except TimeoutError as exc:
            raise EngineOverloadedError("too many large requests are here; retry later") from exc
        finally:
            task.cancellation.cancel()

    def _start_next(self) -> None:
        while len(self._working) < THREADS:
            turn = self._turns.take(without=self._working)
            if turn is None:
                return
            client, task = turn
            if task.done.done():
                continue  # its client left while it waited
            self._working.add(client)
            running = asyncio.get_running_loop().run_in_executor(self._executor, task.run)
            running.add_done_callback(partial(self._ended, client, task))

    def _ended(self, client: str, task: _Task, ran: asyncio.Future[Any]) -> None:
        self._working.remove(client)
        error = ran.exception()
        if task.done.done():
            pass  # its client left meanwhile
        elif error is not None:
            task.done.set_exception(error)
        else:
            task.done.set_result(ran.result())
        self._start_next()
