"""Reports the progress of a download: a line every few seconds, for logs rather than terminals."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from diptych_frontend.model_files.fetch.cache import gib

logger = logging.getLogger(__name__)
PERIOD_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a download at one moment."""

    uri: str
    done_bytes: int
    """Bytes on the disk, including those that an earlier process fetched."""
    total_bytes: int
    bytes_per_s: float
    """Average since this process began."""

    def __str__(self) -> str:
        percent = min(100, 100 * self.done_bytes // max(1, self.total_bytes))
        return (
            f"{self.uri}: {percent}% of {gib(self.total_bytes)}, {self.bytes_per_s / 1e6:.1f} MB/s"
        )


Report = Callable[[Progress], None]


def log_progress(progress: Progress) -> None:
    """Log the progress, in a program without a terminal."""
    logger.info("%s", progress)


class Meter:
    """Counts bytes, and reports from a thread of its own, because hashing takes long too."""

    def __init__(self, uri: str, total: int, done: int, report: Report) -> None:
        self._uri = uri
        self._total = total
        self._before = self._done = done
        self._began = time.monotonic()
        self._report = report

    def advance(self, nbytes: int) -> None:
        """Count `nbytes` more on the disk; fewer, if negative."""
        self._done += nbytes

    def report(self) -> None:
        """Report the progress."""
        elapsed_s = max(time.monotonic() - self._began, 1e-3)
        speed = max(0, self._done - self._before) / elapsed_s
        self._report(Progress(self._uri, self._done, self._total, speed))

    @contextmanager
    def running(self, beat: Callable[[], None]) -> Iterator[None]:
        """Report and `beat` every few seconds, and once more at the end."""
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(PERIOD_S):
                beat()
                self.report()

        thread = threading.Thread(target=run, name="progress", daemon=True)
        thread.start()
        try:
            yield
            self.report()
        finally:
            stop.set()
            thread.join()
