"""MQLLMEngineClients and what tests ask of them.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from engine_kit.core import DUMMY

from diptych_engine import MQLLMEngineClient
from diptych_protocol import EngineConfig, RequestOutputKind, SamplingParams

CONFIG = EngineConfig(DUMMY, num_blocks=64, num_threads=1)
Process = subprocess.Popen[bytes]
Eventually = Callable[..., Awaitable[Any]]


def endpoint(folder: Path) -> str:
    return f"ipc://{folder}/core"


def make_client(folder: Path, process: Process, **options: Any) -> MQLLMEngineClient:
    options = {"rpc_timeout_s": 10.0, **options}
    return MQLLMEngineClient(endpoint(folder), CONFIG, process.pid, **options)


async def read(client: MQLLMEngineClient, request_id: str, prompt: Any = (1, 2)) -> list[int]:
    """All tokens of a request, in the order in which they came."""
    params = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA)
    tokens: list[int] = []
    async for output in client.generate(list(prompt), params, request_id):
        tokens += output.outputs[0].token_ids
    return tokens


def reading(client: MQLLMEngineClient, *request_ids: str) -> list[asyncio.Task[list[int]]]:
    return [asyncio.create_task(read(client, request_id)) for request_id in request_ids]
