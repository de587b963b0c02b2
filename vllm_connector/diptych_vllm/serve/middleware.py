"""Starts the wire beside vLLM's HTTP API: `--middleware diptych_vllm.serve.middleware.Wire`.

    DIPTYCH_BIND_HOST=10.0.0.7 DIPTYCH_CORE_PORT=5557 DIPTYCH_KEYS_DIR=/keys POD_NAME=engine-0 \\
        vllm serve MODEL --middleware diptych_vllm.serve.middleware.Wire

The variables are those of an engine's pod; `settings` has all of them. vLLM loads this module by
its argument, so nothing has to be installed or allowed besides, and calls `Wire` when its server
starts. Without the keys it listens on loopback only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych_kv_transfer.connector import with_literals
from diptych_kv_transfer.signing.references import References
from diptych_protocol import EngineCoreOutputs, EngineDescription, fingerprint, wire
from diptych_protocol.arrays import Frame
from diptych_protocol.threads import resolve_struct_types
from diptych_vllm.serve.engine_view import ServedEngine
from diptych_vllm.serve.event_socket import EventSource, follow
from diptych_vllm.serve.hand_off import VllmHandOffs
from diptych_vllm.serve.kv_events import EventsError, RememberedBlocks
from diptych_vllm.serve.port import WirePort
from diptych_vllm.serve.service import WireService
from diptych_vllm.serve.translation import OURS
from diptych_vllm.settings import ConnectorSettings, ServedPort
from diptych_vllm.versions import http_server_of

log = logging.getLogger(__name__)

LOOK_S: Final = 0.1
EVENTS_RETRY_S: Final = 5.0
NIXL_LEASE: Final = "kv_lease_duration"
NIXL_LEASE_S: Final = 30.0
"""NIXL's default."""


class Wire:
    """ASGI middleware that does nothing but serve the wire as long as the server runs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            served = await _open(scope["app"])
        except Exception as exc:
            # Whatever is raised, uvicorn takes for a server that does without its lifespan.
            log.exception("the wire is not served")
            await receive()
            await send({"type": "lifespan.startup.failed", "message": f"no wire: {exc}"})
            return

        async def watched() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await served.close()
            return message

        await self._app(scope, watched, send)


class ServedWire:
    """The port of the wire, and the service behind it."""

    def __init__(
        self,
        engine: ServedEngine,
        about: EngineDescription,
        hand_offs: VllmHandOffs,
        source: EventSource | None,
        settings: ServedPort,
        leave: Callable[[], None],
    ) -> None:
        """
        Args:
            source: where the engine's core publishes its KV events; None if it publishes none.
            leave: ends the server in good order.

        Raises `zmq.ZMQError` when the port is taken.
        """
        self._leave = leave
        self._port = WirePort(settings.endpoint, settings.keys, self._take)
        blocks = None if source is None else RememberedBlocks(about.block_size, about.num_blocks)
        self._service = WireService(engine, about, hand_offs, blocks, self._port.send, self._die)
        self._tasks = [asyncio.ensure_future(self._service.watch())]
        if source is not None and blocks is not None:
            self._tasks.append(asyncio.ensure_future(self._follow(source, blocks)))
        self._draining: asyncio.Task[None] | None = None

    def _take(self, client: bytes, frames: list[bytes], arrays: list[Frame]) -> None:
        self._service.take(client, frames, arrays)

    async def _follow(self, source: EventSource, blocks: RememberedBlocks) -> None:
        """Report which blocks the core has cached; else routers choose by load."""
        while True:
            try:
                await follow(source, blocks, self._service.tell_prefixes)
            except EventsError as exc:
                log.warning("what the engine remembers is not told: %s", exc)
                blocks.clear()
                await asyncio.sleep(EVENTS_RETRY_S)

    def drain(self, timeout_s: float) -> None:
        """End the server as soon as all requests have ended, or the time is over."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain(timeout_s))

    async def _drain(self, timeout_s: float) -> None:
        log.warning("draining: this engine is about to leave")
        self._service.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._service.drain_report().drained:
                    await asyncio.sleep(LOOK_S)
        self._leave()

    def _die(self) -> None:
        """Tell clients that vLLM's core has ended; its server will end soon."""
        why = EngineCoreOutputs(last_words="vLLM's engine core has died; its log says why")
        self._tasks.append(asyncio.ensure_future(self._end([wire.encoder.encode(why)])))

    async def close(self) -> None:
        """Tell every client that the engine is gone. Calling it again is harmless."""
        self._service.abort_all()
        await self._end([])
        for task in self._tasks:
            task.cancel()

    async def _end(self, last_words: list[list[Frame]]) -> None:
        await self._port.close(self._service.clients, [*last_words, [wire.ENGINE_CORE_DEAD]])


async def _open(app: Any) -> ServedWire:
    """Serve the engine of vLLM's application. Raises `InvalidRequestError` for settings that do not
    fit."""
    # Only here, so that this module can be read without vLLM.
    from diptych_vllm.serve.engine import ServedVllm

    resolve_struct_types()
    settings = ServedPort.of(os.environ)
    engine = ServedVllm(app.state.engine_client, settings)
    about = await engine.describe()
    hand_offs = _hand_offs_of(engine.connector, engine.connector_config, fingerprint(about.compat))
    server = http_server_of(app)

    def leave() -> None:
        server.should_exit = True

    served = ServedWire(engine, about, hand_offs, engine.event_source, settings, leave)
    # In place of vLLM's own handler, which ends the core at once.
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, served.drain, engine.shutdown_timeout_s
    )
    log.warning("routers are served at %s", settings.endpoint)
    return served


def _hand_offs_of(connector: str, config: dict[str, Any], compat: str) -> VllmHandOffs:
    if connector == OURS:
        settings = with_literals(ConnectorSettings.parse(config))
        return VllmHandOffs(connector, compat, settings.lease_seconds, References(settings.key()))
    return VllmHandOffs(connector, compat, float(config.get(NIXL_LEASE, NIXL_LEASE_S)), None)
