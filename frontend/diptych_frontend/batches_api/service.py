"""Creates, starts and closes a server's files and batches."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.types import ASGIApp

from diptych_frontend.batches_api.batch_run import BatchMetrics, Manners, Surroundings
from diptych_frontend.batches_api.batch_store import BatchStore
from diptych_frontend.batches_api.disk import Disk
from diptych_frontend.batches_api.file_store import FileStore
from diptych_frontend.batches_api.folder import Folder
from diptych_frontend.batches_api.runner import BatchRunner
from diptych_frontend.batches_api.upload import Uploads
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_protocol.config import Batches


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
        self._runner = BatchRunner(
            Surroundings(
                self.store,
                self.disk,
                self._metrics,
                asyncio.Semaphore(self._settings.concurrency),
                app,
                self._manners,
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
