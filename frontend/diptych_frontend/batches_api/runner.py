"""Runs batches in this process: those that no other process has taken."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Final

from diptych_frontend.batches_api.batch_run import BatchRun, Surroundings
from diptych_protocol import DiptychError

log = logging.getLogger(__name__)

LOOK_S: Final = 2.0
"""How often the runner looks for new batches, and for those whose process has died."""
MAX_RUNNING: Final = 8
"""The most batches that a process runs at a time; one per client."""
REST_S: Final = 15.0
"""How long a batch that stopped for a reason is left alone."""
SWEEP_S: Final = 600.0
CLOSE_TIMEOUT_S: Final = 45.0


class BatchRunner:
    """Runs batches until it is closed."""

    def __init__(self, server: Surroundings) -> None:
        self._server = server
        self._running: dict[Path, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._clients: set[str] = set()
        self._resting: dict[Path, float] = {}
        """Until when, by the monotonic clock."""
        self._news = asyncio.Event()
        self._closing = False
        self._swept_at = -SWEEP_S
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to run batches. Call it inside a running event loop."""
        self._main = asyncio.create_task(self._run(), name="batches")

    def look(self) -> None:
        """Look for a new batch now."""
        self._news.set()

    async def close(self) -> None:
        """Stop all work, and leave the batches to other processes. Safe to call twice."""
        self._closing = True
        self._news.set()
        for run, _ in self._running.values():
            run.release()
        tasks = [task for _, task in self._running.values()]
        if self._main is not None:
            tasks.append(self._main)
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)

    async def _run(self) -> None:
        while not self._closing:
            self._news.clear()
            try:
                await self._take_some()
                await self._sweep()
            except (OSError, DiptychError) as exc:
                log.error("batches cannot be looked for: %s", exc)
            except Exception:
                log.exception("batches cannot be looked for")
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _take_some(self) -> None:
        now = time.monotonic()
        self._resting = {state: until for state, until in self._resting.items() if until > now}
        for state in await self._server.disk.run(self._server.store.open_batches):
            if self._closing or len(self._running) >= MAX_RUNNING:
                return
            if state in self._resting or _client_of(state) in self._clients:
                continue
            await self._take(state)

    async def _take(self, state: Path) -> None:
        try:
            # Not given up while it reads: nobody else would ever have the lock.
            claimed = await self._server.disk.run_long(self._server.store.claim, state)
        except Exception as exc:  # a state that cannot be read must not keep others waiting
            log.error("%s cannot be worked on: %s", state.stem, exc)
            self._rest(state)
            return
        if claimed is None:
            return
        record, journal = claimed
        if not self._server.manners.is_client(record.client) or self._closing:
            journal.close()
            self._rest(state)
            return
        run = BatchRun(self._server, state, record, journal)
        self._clients.add(_client_of(state))
        task = asyncio.create_task(self._follow(run, state), name=state.stem)
        self._running[state] = run, task
        self._server.metrics.running.set(len(self._running))

    async def _follow(self, run: BatchRun, state: Path) -> None:
        try:
            await run.run()
        except (OSError, DiptychError) as exc:
            log.error("%s stopped: %s; it goes on in %g s", state.stem, exc, REST_S)
            self._rest(state)
        except Exception:
            log.exception("%s stopped; it goes on in %g s", state.stem, REST_S)
            self._rest(state)
        finally:
            del self._running[state]
            self._clients.discard(_client_of(state))
            self._server.metrics.running.set(len(self._running))
            self._news.set()

    def _rest(self, state: Path) -> None:
        self._resting[state] = time.monotonic() + REST_S

    async def _sweep(self) -> None:
        if time.monotonic() - self._swept_at >= SWEEP_S:
            self._swept_at = time.monotonic()
            await self._server.disk.run_long(self._server.store.sweep)


def _client_of(state: Path) -> str:
    return state.parent.parent.name
