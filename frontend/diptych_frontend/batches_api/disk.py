"""Threads for blocking calls on the disk, which may be across the network."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import BinaryIO, Final, ParamSpec, TypeVar

from diptych_protocol import EngineOverloadedError

log = logging.getLogger(__name__)

THREADS: Final = 4
PATIENCE_S: Final = 60.0
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}

P = ParamSpec("P")
T = TypeVar("T")


class Disk:
    """Runs blocking calls on the disk. The threads end when this object is garbage-collected."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="batches")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` and return its result, or raise its error. Raises `EngineOverloadedError` if
        the disk is full, fails or does not answer; `work` may continue then."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.run_long(work, *args, **kwargs)
        except TimeoutError as exc:
            raise EngineOverloadedError("the batch directory does not answer; retry later") from exc
        except OSError as exc:
            log.error("the batch directory fails: %s", exc)
            what = "is full" if exc.errno in _FULL else "fails"
            raise EngineOverloadedError(f"the batch directory {what}; retry later") from exc

    async def run_long(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on whole files, without a time limit. Raises `OSError` itself."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, partial(work, *args, **kwargs))

    def close(self, file: BinaryIO) -> None:
        """Close a file once no thread uses it."""
        # A thread whose caller has given up may still use the file, and its descriptor must not
        # become that of another file meanwhile.
        self._executor.submit(_close, file)


def _close(file: BinaryIO) -> None:
    try:
        file.close()  # waits for the file's own lock
    except OSError as exc:
        log.error("a file of a batch cannot be closed: %s", exc)
