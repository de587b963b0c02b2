"""What an engine says and does when it cannot start."""

from __future__ import annotations

import asyncio

import pytest
from waits import PATIENCE_S

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import EngineConfig, EngineDeadError


async def test_a_core_that_ends_before_it_listens_ends_the_wait_for_it() -> None:
    more_memory_than_any_machine_has = 1 << 58
    config = EngineConfig(
        model="dummy://?num_hidden_layers=1&hidden_size=64",
        kv_cache_bytes=more_memory_than_any_machine_has,
        device="cpu",
    )
    with pytest.raises(EngineDeadError, match="exited with code"):
        async with asyncio.timeout(PATIENCE_S):
            await AsyncLLM.start(config)
