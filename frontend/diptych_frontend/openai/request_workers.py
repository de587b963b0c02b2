"""Threads for work that would block the event loop: large bodies, grammars, and waiting for
processes.

A thread helps only if its work releases the GIL. Tokenising and compiling grammars do, and Python
code does every `SWITCH_INTERVAL_S` (`server.py`). Decoding JSON does not, so what it may cost is
limited (`confined/json_cost.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar

from starlette.types import Scope

from diptych_frontend.confined.cancellation import (
    Cancellation,
    NotAtOnceError,
    cancelled_by,
    in_haste,
)
from diptych_frontend.confined.json_cost import CHEAP_BYTES
from diptych_frontend.openai.exchange import exchange_of
from diptych_protocol import EngineOverloadedError

T = TypeVar("T")

SMALL_BYTES = 16 << 10
"""An item up to this size is accepted however much other clients have waiting."""
INLINE_BYTES: Final = CHEAP_BYTES
"""Bodies up to this size are decoded on the event loop. That takes at most a few milliseconds, less
than a change to a thread and back."""
THREADS: Final = 2
"""The threads of each lane. A client has one of them at a time, so it delays no others and uses one
processor."""
MAX_WAITING_BYTES: Final = 64 << 20
"""One client may use half of it."""
TURN_TIMEOUT_S: Final = 30.0
"""A request that waited and worked this long is refused, so that its client can try
another server."""


class Turns(Generic[T]):
    """The waiting items, by client. Each client with waiting items has one turn per round, so that
    one with a thousand requests delays another's by one of them, not by all."""

    def __init__(self, max_bytes: int) -> None:
        """This many bytes of items may wait, half of them of one client. Other clients' items never
        keep small ones out."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._bytes_of = Counter[str]()
        self._queues: OrderedDict[str, deque[tuple[T, int]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def put(self, client: str, item: T, size: int) -> None:
        """Add an item. Raises `EngineOverloadedError` if too much waits already."""
        if self._bytes_of[client] + size > self._max_bytes // 2:
            raise EngineOverloadedError(
                "too many large requests of this client wait already; retry later"
            )
        if size > SMALL_BYTES and self._bytes + size > self._max_bytes:
            raise EngineOverloadedError("too many large requests wait already; retry later")
        self._queues.setdefault(client, deque()).append((item, size))
        self._bytes += size
        self._bytes_of[client] += size

    def take(self, without: Container[str] = ()) -> tuple[str, T] | None:
        """Remove and return the next item and its client, who then comes last. without: clients to
        skip. None if nobody else waits."""
        client = next((client for client in self._queues if client not in without), None)
        if client is None:
            return None
        queue = self._queues[client]
        item, size = queue.popleft()
        self._bytes -= size
        self._bytes_of[client] -= size
        if queue:
            self._queues.move_to_end(client)
        else:
            del self._queues[client], self._bytes_of[client]
        return client, item


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
    """Runs work for clients in turns: texts in one lane and images in another, so that no text
    waits behind an image. The threads start with the first work, and end when this object is
    garbage-collected."""

    def __init__(self) -> None:
        self._texts, self._images = _Lane("requests"), _Lane("images")

    async def run(
        self, scope: Scope, size: int, work: Callable[[], T], *, has_images: bool = False
    ) -> T:
        """Run `work` when it is the turn of the request's client, and return its result.

        `size` is the memory that the waiting work uses, in bytes. Raises what `work` raises, and
        `EngineOverloadedError` if too much waits already, or it takes too long. Cancelling the
        caller, or a time-out, ends the work too (`confined.cancellation`).
        """
        return await (self._images if has_images else self._texts).run(scope, size, work)

    async def small(self, scope: Scope, size: int, work: Callable[[], T]) -> T:
        """Run `work` here if that is quick enough for the event loop; otherwise repeat it from its
        beginning, as by `run`."""
        token = in_haste.set(True)
        try:
            return work()
        except NotAtOnceError:
            pass
        finally:
            in_haste.reset(token)
        return await self.run(scope, size, work)

    async def read(
        self, scope: Scope, body: bytes, work: Callable[[], T], image_word: bytes | None = None
    ) -> T:
        """Decode a body by `work`: at once if the body is small, otherwise by `run`.

        image_word: bodies with images contain this word, and images make even a small body much
        work.
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
        self._turns.put(exchange_of(scope).client, task, size)
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
