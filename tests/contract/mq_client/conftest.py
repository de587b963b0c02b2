"""A client, an engine that does what it is told, and a process that stands for it."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from engine_kit.fake_core import FakeCore
from engine_kit.mq import Process, endpoint, make_client

from diptych_engine import MQLLMEngineClient


@pytest.fixture
def process() -> Iterator[Process]:
    """What stands for the engine's process; killed, it stays a zombie until the test ends."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest_asyncio.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeCore]:
    core = FakeCore(endpoint(tmp_path))
    yield core
    await core.close()


@pytest_asyncio.fixture
async def client(
    tmp_path: Path, process: Process, fake: FakeCore
) -> AsyncIterator[MQLLMEngineClient]:
    client = make_client(tmp_path, process)
    await client.setup()
    yield client
    client.close()
