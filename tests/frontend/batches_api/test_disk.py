"""Threads that wait for a disk which does not answer."""

from __future__ import annotations

import asyncio
import os

import pytest
from waits import PATIENCE_S

from diptych_frontend.batches_api import folder
from diptych_frontend.batches_api.folder import Disk
from diptych_protocol import EngineOverloadedError

CONTENT = bytes(1 << 20)
"""More than a pipe takes of somebody whom nobody reads."""


async def test_a_file_stays_open_while_a_thread_that_was_given_up_writes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its descriptor would become that of another file or connection, and the thread would
    write there."""
    monkeypatch.setattr(folder, "PATIENCE_S", 0.05)
    reading, writing = os.pipe()
    file, threads = os.fdopen(writing, "wb"), Disk()
    with pytest.raises(EngineOverloadedError, match="does not answer"):
        await threads.run(file.write, CONTENT)
    threads.close(file)
    with open(reading, "rb") as other_end:
        received = await asyncio.to_thread(other_end.read)  # until it is closed
    assert received == CONTENT
    assert file.closed


async def test_what_cannot_be_closed_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    threads = Disk()
    file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")
    file.write(b"x")
    threads.close(file)
    async with asyncio.timeout(PATIENCE_S):
        while "cannot be closed: [Errno 28]" not in caplog.text:
            await asyncio.sleep(0.01)
