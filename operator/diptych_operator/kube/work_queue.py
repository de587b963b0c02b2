"""The queue of services that need a pass: each key once, one worker a key, with back-off.

It keeps the contract of client-go's work queue, on asyncio.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from diptych_protocol import DiptychError

log = logging.getLogger(__name__)

Key = TypeVar("Key")

PASS_S = 300.0
"""A pass that takes longer than this is cancelled and tried again."""
BACKOFF_S = (1.0, 2.0, 5.0, 15.0, 60.0)


class WorkQueue(Generic[Key]):
    """Runs `work(key)` for keys that were added, at most `concurrency` at once.

    `work` returns the seconds until it wants to see the key again, or None to wait for a change. A
    key that is added while it is being worked on is worked on once more.
    """

    def __init__(
        self, work: Callable[[Key], Awaitable[float | None]], *, concurrency: int, batch_s: float
    ) -> None:
        self._work = work
        self._concurrency = concurrency
        self._batch_s = batch_s
        """Events that arrive together are one pass: an added key waits so long."""
        self._due: list[tuple[float, int, Key]] = []
        self._due_of: dict[Key, float] = {}
        self._running: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._order = itertools.count()
        self._changed = asyncio.Event()
        self._ended_at = float("-inf")
        """When a pass last ended."""

    def backlog(self) -> int:
        """The number of keys that are due and wait for a worker."""
        now = self._now()
        return sum(due <= now for due in self._due_of.values())

    def standstill_s(self) -> float:
        """For how long keys have been due while no pass ended."""
        now = self._now()
        return max(0.0, now - max(self._ended_at, min(self._due_of.values(), default=now)))

    def add(self, key: Key, after_s: float | None = None) -> None:
        """Have the key worked on within this many seconds."""
        if key in self._running:
            if after_s is None:
                self._again.add(key)
            return
        due = self._now() + (self._batch_s if after_s is None else after_s)
        if due < self._due_of.get(key, float("inf")):
            self._due_of[key] = due
            heapq.heappush(self._due, (due, next(self._order), key))
            self._changed.set()

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                wait = self._start_due(group)
                try:
                    async with asyncio.timeout(wait):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def _start_due(self, group: asyncio.TaskGroup) -> float | None:
        """Start what is due; how long until the next."""
        while self._due and len(self._running) < self._concurrency:
            due, _, key = self._due[0]
            if self._due_of.get(key) != due:  # due earlier meanwhile
                heapq.heappop(self._due)
                continue
            if due > self._now():
                return due - self._now()
            heapq.heappop(self._due)
            del self._due_of[key]
            self._running.add(key)
            group.create_task(self._attend(key))
        return None

    async def _attend(self, key: Key) -> None:
        again: float | None
        try:
            async with asyncio.timeout(PASS_S):
                again = await self._work(key)
            self._failures.pop(key, None)
        except Exception as exc:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            again = BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]
            known = isinstance(exc, DiptychError)
            log.error(
                "%s: failed, once more in %g s: %s",
                key,
                again,
                str(exc) or f"no end within {PASS_S:g} s",
                exc_info=None if known else exc,
            )
        finally:
            self._running.discard(key)
            self._ended_at = self._now()
            self._changed.set()
        if key in self._again:
            self._again.discard(key)
            self.add(key)
        if again is not None:
            self.add(key, again)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
