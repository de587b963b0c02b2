"""An engine that hangs, while its socket lives on, gets no more work: real engines."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from engine_kit import worker_extension
from service_kit import (
    Streaming,
    all_usable,
    cores,
    engine_config,
    generate,
    link_of,
    routing,
)

from diptych_router import engine_link

HANGS_S = 600.0
"""Longer than the test."""


async def test_a_hanging_engine_gets_no_more_requests_while_there_are_others(
    smollm2: str, keys_dir: Path, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    support = Path(worker_extension.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(support), prepend=os.pathsep)  # for the engines
    monkeypatch.setattr(engine_link, "SILENT_S", 1.0)
    names = ("prefill-0", "decode-0", "decode-1")
    configs = [
        engine_config(name, smollm2, worker_extension="engine_kit.worker_extension:Extension")
        for name in names
    ]
    with cores(keys_dir, *configs) as (prefill, *decode):
        addresses = [core.address for core in decode]
        async with routing(smollm2, keys_dir, [prefill.address], addresses) as client:
            await all_usable(client, 3)
            hanging, other = (link_of(client, core) for core in decode)
            other.open_tokens += 1_000_000
            stream = Streaming(client, "The lighthouse keeper climbed the stairs, and", 4000)
            await eventually(lambda: len(stream.token_ids) > 3)
            other.open_tokens -= 1_000_000
            call = asyncio.create_task(
                hanging.client.call("collective_rpc", "sleep", [HANGS_S], {}, timeout_s=HANGS_S)
            )
            try:
                await eventually(lambda: hanging.silent)
                assert hanging.up
                assert pair_of(await generate(client, "Who answers?")) == other.name
                # Alone it is better than nobody.
                other.listed = False
                decision = client.pools.choose()
                assert decision is not None
                assert decision.decode == hanging.key
            finally:
                call.cancel()
                await stream.leave()


def pair_of(output: Any) -> str:
    return str(output.metrics["decode"])
