"""Sends a workload to an API and collects the outcomes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from diptych.answer_stream import AnswerError
from diptych.api_service import Service
from diptych.bench.figures import Sent
from diptych.bench.stream import stream
from diptych.bench.workload import Request

MAX_FAILURES: Final = 50
"""A run ends after this many failures in a row."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How requests are sent."""

    concurrency: int
    """The most requests that are open at a time."""
    timeout_s: float
    """The time limit of each request."""
    seconds: float | None = None
    """When to stop sending requests; None: after the last one."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request's body."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run."""

    sent: list[Sent]
    """Requests that have ended, in the order in which they ended."""
    seconds: float
    cut_off: int = 0
    """Requests that were open when the run was ended early."""


class Run:
    """One run, which can be ended early."""

    def __init__(self, service: Service, plan: Plan, tell: Callable[[Sent], None]) -> None:
        """`tell` is called with each request that has ended."""
        self._service = service
        self._plan = plan
        self._tell = tell
        self._sent: list[Sent] = []
        self._open: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._failures = 0
        """In a row."""

    def stop(self) -> None:
        """End the run now and cut off open requests."""
        self._stop.set()

    @property
    def is_stopped(self) -> bool:
        """Whether it was ended early, by the user or after too many failures."""
        return self._stop.is_set()

    async def send(self, requests: Iterator[tuple[float, Request]]) -> Outcome:
        """Send each request at its time, or later if too many are open."""
        # A connection for each request: some servers close one after an answer, unannounced.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(self._plan.timeout_s)
        async with httpx.AsyncClient(
            base_url=self._service.url, timeout=timeout, limits=limits, **self._service.client
        ) as client:
            started = time.perf_counter()
            sending = asyncio.create_task(self._send_all(client, requests, started))
            stopping = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
                seconds = time.perf_counter() - started
                cut_off = len(self._open)
                if sending.done():
                    sending.result()
            finally:
                left = [sending, stopping, *self._open]
                for task in left:
                    task.cancel()
                await asyncio.wait(left)
        return Outcome(self._sent, seconds, cut_off)

    async def _send_all(
        self, client: httpx.AsyncClient, requests: Iterator[tuple[float, Request]], started: float
    ) -> None:
        gate = asyncio.Semaphore(self._plan.concurrency)
        for arrival, request in requests:
            await asyncio.sleep(max(0.0, started + arrival - time.perf_counter()))
            await gate.acquire()
            at_s = time.perf_counter() - started
            if self._plan.seconds is not None and at_s >= self._plan.seconds:
                break
            task = asyncio.create_task(self._ask(client, request, at_s))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            task.add_done_callback(lambda _: gate.release())
        if self._open:
            await asyncio.wait(set(self._open))

    async def _ask(self, client: httpx.AsyncClient, request: Request, at_s: float) -> None:
        body = {
            "model": self._service.model,
            "messages": request.messages,
            "max_tokens": request.max_tokens,
            **self._plan.fields,
        }
        try:
            answer = await stream(client, "chat/completions", body, self._plan.timeout_s)
            sent, self._failures = Sent(at_s, answer), 0
        except AnswerError as exc:
            sent, self._failures = Sent(at_s, str(exc)), self._failures + 1
            if self._failures >= MAX_FAILURES:
                self.stop()
        self._sent.append(sent)
        self._tell(sent)
