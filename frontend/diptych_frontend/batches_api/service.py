"""Creates, starts and closes a server's files and batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp

from diptych_frontend.batches_api.batch_run import BatchMetrics, Surroundings
from diptych_frontend.batches_api.batch_store import BatchStore
from diptych_frontend.batches_api.disk import Disk
from diptych_frontend.batches_api.file_store import FileStore
from diptych_frontend.batches_api.folder import Folder
from diptych_frontend.batches_api.runner import BatchRunner
from diptych_frontend.batches_api.upload import Uploads
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_protocol.config import Batches

PRIORITY: Final = 1000
"""The most urgent priority of batches' requests, where engines use priorities."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How batches give way to requests of waiting users."""

    is_busy: Callable[[], bool] = lambda: False
    """Whether requests wait for the engines."""
    has_priorities: Callable[[], bool] = lambda: False
    """Whether engines use the priorities of requests."""
    is_client: Callable[[str], bool] = lambda client: True
    """Whether an API key of this name is valid; without keys the name is empty."""


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
        self._runner: BatchRunner | None = None

    def start(self, app: ASGIApp) -> None:
        """Begin to run batches with the routes of this app. Call it inside a running event loop."""
        manners = self._manners
        self._runner = BatchRunner(
            Surroundings(
                self.store,
                self.disk,
                self._metrics,
                asyncio.Semaphore(self._settings.concurrency),
                app,
                manners.is_busy,
                lambda: PRIORITY if manners.has_priorities() else None,
                manners.is_client,
            )
        )
        self._runner.start()

    def look(self) -> None:
        """Look for a new batch now."""
        if self._runner is not None:
            self._runner.look()

    async def close(self) -> None:
        """Stop running batches; another process may continue them. Safe to call twice."""
        if self._runner is not None:
            await self._runner.close()
