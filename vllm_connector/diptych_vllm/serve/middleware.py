"""Starts the wire beside vLLM's HTTP API: `--middleware diptych_vllm.serve.middleware.Wire`.

    DIPTYCH_BIND_HOST=10.0.0.7 DIPTYCH_CORE_PORT=5557 DIPTYCH_KEYS_DIR=/keys POD_NAME=engine-0 \\
        vllm serve MODEL --middleware diptych_vllm.serve.middleware.Wire

The variables are those of an engine's pod; `settings` has all of them. vLLM loads this module by
its argument, so nothing has to be installed or allowed besides, and calls `Wire` when its server
starts. Without the keys it listens on loopback only.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych_protocol import wire
from diptych_protocol.threads import resolve_struct_types
from diptych_vllm.serve.port import WirePort
from diptych_vllm.serve.service import WireService
from diptych_vllm.serve.settings import ServedPort

log = logging.getLogger(__name__)


class Wire:
    """ASGI middleware that does nothing but serve the wire as long as the server runs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        served = _open(scope["app"])

        async def watched() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                served.close()
            return message

        await self._app(scope, watched, send)


class ServedWire:
    """The port, and the service behind it."""

    def __init__(self, engine: Any, settings: ServedPort, on_death: Any) -> None:
        self.port = WirePort(settings.endpoint, settings.keys, self._take)
        self.service = WireService(engine, self.port.send, on_death)

    def _take(self, client: bytes, frames: list[bytes], arrays: list[Any]) -> None:
        self.service.take(client, frames, arrays)

    def close(self) -> None:
        """Tell every client that the engine is gone."""
        self.service.abort_all()
        self.port.close(self.service.clients, [[wire.ENGINE_CORE_DEAD]])


def _open(app: Any) -> ServedWire:
    """Serve the engine of vLLM's application. Raises `InvalidRequestError` for settings that do not
    fit, which ends vLLM's start."""
    # Only here, so that this module can be read without vLLM.
    from diptych_vllm.serve.engine import ServedVllm

    resolve_struct_types()
    settings = ServedPort.of(os.environ)
    engine = ServedVllm(app.state.engine_client, settings)
    served = ServedWire(engine, settings, lambda: None)
    log.warning("routers are served at %s", settings.endpoint)
    return served
