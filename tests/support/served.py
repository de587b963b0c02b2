"""Serves apps in a test's event loop. On the import path of the tests (`pythonpath` of pytest)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from diptych_frontend.openai.server import Site, listen, serve_sites


async def serve_http(app: Any, host: str, port: int, **options: Any) -> None:
    """Serve one app until cancellation; see `listen` and `serve_sites`."""
    await serve_sites(Site(app, listen(host, port)), **options)


@contextlib.asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[str]:
    """Serve the app on a free port of this test's loop; yields the base URL."""
    address: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve_http(app, "127.0.0.1", 0, on_ready=lambda *a: address.set_result(a), **options)
    )
    await asyncio.wait((task, address), return_when=asyncio.FIRST_COMPLETED)
    try:
        host, port = address.result()
        yield f"http://{host}:{port}"
    finally:
        task.cancel()
        await asyncio.wait((task,))
