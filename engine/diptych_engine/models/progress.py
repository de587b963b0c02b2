"""Reports the progress of loading a model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S: Final = 5.0


def log_progress(uri: str) -> Callable[[int, int], None]:
    """Return a callback that logs it every few seconds."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_INTERVAL_S:
            last = now
            log.info("loading %s: %d of %d MB", uri, done // 1_000_000, total // 1_000_000)

    return report
