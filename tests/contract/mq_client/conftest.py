"""An engine in a process of its own, which no client here owns, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from engine_kit.fake_core import FakeCore
from engine_kit.mq import DOOMED, endpoint, real_with, running, set_up

from diptych_engine import MQLLMEngineClient
from diptych_frontend.core_client.launcher import CoreProcess


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoreProcess]:
    """The engine of all tests that leave it well."""
    traces = tmp_path_factory.mktemp("traces")
    with running(real_with(profile_dir=str(traces))) as core:
        yield core


@pytest_asyncio.fixture
async def client(served: CoreProcess) -> AsyncIterator[MQLLMEngineClient]:
    async with set_up(served) as client:
        yield client


@pytest.fixture
def doomed() -> Iterator[CoreProcess]:
    """An engine for one test, which may do with it what it wants."""
    with running(DOOMED) as core:
        yield core


@pytest_asyncio.fixture
async def mourner(doomed: CoreProcess) -> AsyncIterator[MQLLMEngineClient]:
    """A client of the doomed engine."""
    async with set_up(doomed) as client:
        yield client


@pytest_asyncio.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeCore]:
    """What says what no engine says."""
    core = FakeCore(endpoint(tmp_path))
    yield core
    await core.close()
