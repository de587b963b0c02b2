"""What a client of a core knows of the core's end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from engine_kit.fake_core import FakeCore

from diptych_frontend.core_client.client import CoreClient
from diptych_protocol import EngineCoreOutputs, EngineDeadError, wire


async def test_last_words_outlive_a_new_connection(
    tmp_path: Path, eventually: Callable[..., Awaitable[Any]]
) -> None:
    """ZMQ connects again while the core that ends still listens; that is no new core."""
    endpoint = f"ipc://{tmp_path}/core"
    lost: list[EngineDeadError] = []
    core = FakeCore(endpoint)
    client = CoreClient(endpoint, None, on_outputs=lambda _: None, on_lost=lost.append)
    try:
        await client.describe()
        await core.send(*wire.encoder.encode(EngineCoreOutputs(last_words="rank 1 was killed")))
        await eventually(lambda: client.hear_last_words())
        await core.close()
        await eventually(lambda: lost)
        core = FakeCore(endpoint)
        await eventually(lambda: client.connected)
        assert client.hear_last_words() == "rank 1 was killed"
        await client.describe()
        assert client.hear_last_words() == "", "who answers now has not ended"
    finally:
        client.close()
        await core.close()
