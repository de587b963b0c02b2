"""A server's files and batches: it runs those batches that no other process has taken."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp

from diptych_frontend.batches_api.batch_run import BatchMetrics, BatchRun, Manners, Surroundings
from diptych_frontend.batches_api.batch_store import BatchStore
from diptych_frontend.batches_api.file_store import FileStore
from diptych_frontend.batches_api.folder import Disk, Folder
from diptych_frontend.batches_api.upload import Uploads
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_protocol import DiptychError
from diptych_protocol.config import Batches

log = logging.getLogger(__name__)

LOOK_S: Final = 2.0
"""How often a server looks for new batches, and for those whose process has died."""
MAX_RUNNING: Final = 8
"""The most batches that a process runs at a time; one per client."""
REST_S: Final = 15.0
"""How long a batch that stopped for a reason is left alone."""
SWEEP_S: Final = 600.0
CLOSE_TIMEOUT_S: Final = 45.0


class BatchService:
    """The files and batches of a server with a batch directory."""

    def __init__(
        self, directory: Path, settings: Batches, metrics: ServerMetrics, manners: Manners
    ) -> None:
        """Raises `InvalidRequestError` if the directory cannot be written to."""
        self.disk = Disk()
        self.files = FileStore(folder := Folder(directory), settings.max_bytes)
        self.store = BatchStore(folder, self.files)
        self.uploads = Uploads(self.files, self.disk)
        self._metrics = BatchMetrics(metrics.registry, metrics.model_name)
        self._settings = settings
        self._manners = manners
        self._running: dict[Path, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._clients: set[str] = set()
        self._resting: dict[Path, float] = {}
        """Until when, by the monotonic clock."""
        self._news = asyncio.Event()
        self._closing = False
        self._swept_at = -SWEEP_S
        self._main: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp) -> None:
        """Begin to run batches with the routes of this app. Call it inside a running event loop."""
        slots = asyncio.Semaphore(self._settings.concurrency)
        server = Surroundings(self.store, self.disk, self._metrics, slots, app, self._manners)
        self._main = asyncio.create_task(self._run(server), name="batches")

    def look(self) -> None:
        """Look for a new batch now."""
        self._news.set()

    async def close(self) -> None:
        """Stop running batches; another process may continue them. Safe to call twice."""
        self._closing = True
        self._news.set()
        for run, _ in self._running.values():
            run.release()
        tasks = [task for _, task in self._running.values()]
        if self._main is not None:
            tasks.append(self._main)
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)

    async def _run(self, server: Surroundings) -> None:
        while not self._closing:
            self._news.clear()
            try:
                await self._take_some(server)
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

    async def _take_some(self, server: Surroundings) -> None:
        now = time.monotonic()
        self._resting = {state: until for state, until in self._resting.items() if until > now}
        for state in await self.disk.run(self.store.open_batches):
            if self._closing or len(self._running) >= MAX_RUNNING:
                return
            if state in self._resting or _client_of(state) in self._clients:
                continue
            await self._take(server, state)

    async def _take(self, server: Surroundings, state: Path) -> None:
        try:
            # Not given up while it reads: nobody else would ever have the lock.
            claimed = await self.disk.run_long(self.store.claim, state)
        except Exception as exc:  # a state that cannot be read must not keep others waiting
            log.error("%s cannot be worked on: %s", state.stem, exc)
            self._rest(state)
            return
        if claimed is None:
            return
        record, journal = claimed
        if not self._manners.is_client(record.client) or self._closing:
            journal.close()
            self._rest(state)
            return
        run = BatchRun(server, state, record, journal)
        self._clients.add(_client_of(state))
        task = asyncio.create_task(self._follow(run, state), name=state.stem)
        self._running[state] = run, task
        self._metrics.running.set(len(self._running))

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
            self._metrics.running.set(len(self._running))
            self._news.set()

    def _rest(self, state: Path) -> None:
        self._resting[state] = time.monotonic() + REST_S

    async def _sweep(self) -> None:
        if time.monotonic() - self._swept_at >= SWEEP_S:
            self._swept_at = time.monotonic()
            await self.disk.run_long(self.store.sweep)


def _client_of(state: Path) -> str:
    return state.parent.parent.name
