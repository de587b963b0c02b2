"""Fixtures of running services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from served import serve_http
from service_kit import Pair, engine_config, healthy, make_router, start_engine

from diptych_frontend.app import build_app
from diptych_frontend.core_client.curve import new_keys, read_keys


@pytest.fixture(scope="session")
def keys_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A service's CURVE keys, as a mounted Secret has them."""
    folder = tmp_path_factory.mktemp("keys")
    keys = new_keys()
    (folder / "curve-public").write_text(keys.public)
    (folder / "curve-secret").write_text(keys.secret)
    return folder


@pytest.fixture(scope="module")
def pair_options() -> dict[str, Any]:
    """What a module's pair has that others have not."""
    return {}


@pytest.fixture(scope="module")
def router_options() -> dict[str, Any]:
    """What its router has that others have not."""
    return {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    smollm2: str, keys_dir: Path, pair_options: dict[str, Any], router_options: dict[str, Any]
) -> AsyncIterator[Pair]:
    (prefill, at_p), (decode, at_d) = await asyncio.gather(
        start_engine(engine_config("prefill-0", smollm2, **pair_options), keys_dir),
        start_engine(engine_config("decode-0", smollm2, **pair_options), keys_dir),
    )
    keys = read_keys(keys_dir)
    pools = make_router(smollm2, at_p, at_d, lambda: [keys], **router_options)
    pools.start()
    try:
        await healthy(pools)
        yield Pair(prefill, decode, pools)
    finally:
        pools.shutdown()
        prefill.shutdown()
        decode.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base_url(pair: Pair) -> AsyncIterator[str]:
    """Base URL of an HTTP server in front of the pair's router."""
    bound: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    app = build_app(pair.pools)
    server = asyncio.create_task(
        serve_http(app, "127.0.0.1", 0, on_ready=lambda *at: bound.set_result(at))
    )
    try:
        host, port = await bound
        yield f"http://{host}:{port}"
    finally:
        server.cancel()
        await asyncio.wait((server,))
