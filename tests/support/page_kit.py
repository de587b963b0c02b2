"""The page in front of a small engine that echoes, for tests of the chat alone: an answer says what
was asked. On the import path of the tests (pytest's `pythonpath`)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine_kit.echo_engine import EOS, ByteRenderer, EchoEngine
from free_ports import free_port
from served import serve_http
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_protocol import TokensPrompt
from diptych_protocol.admin import Explanation
from diptych_router.telling.page.panels import Panels, panels_of
from diptych_router.telling.page.routes import Page


class Thinking(ByteRenderer):
    """A template that writes nothing but the last message, so that an answer is what it says."""

    def render_chat(self, messages: list[dict[str, Any]], **_: Any) -> TokensPrompt:
        return self.render_prompt([*messages[-1]["content"].encode(), EOS])


@dataclass
class Echo:
    """A server of the page and of the API, whose engine echoes."""

    port: int = field(default_factory=free_port)
    engine: EchoEngine = field(default_factory=EchoEngine)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    pools: Panels = field(default_factory=lambda: panels_of([], 0, 0))
    """What the page is told of the pools."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def hold(self, held: bool) -> None:
        """Hold every token back, or let them go."""
        gate = self.engine.gate
        self.loop.call_soon_threadsafe(gate.clear if held else gate.set)

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        page = Page(
            lambda: self.pools,
            lambda _, tenant: Explanation(policy="none", disaggregate="never", requests=[]),
            model="echo",
            images=lambda: False,
            leaving=stop.is_set,
            control=None,
        )
        app = build_app(self.engine, extra_routes=page.routes(), extra_open_paths=page.open_paths)
        serving = asyncio.create_task(
            serve_http(app, "127.0.0.1", self.port, on_ready=lambda *_: ready.set())
        )
        await stop.wait()
        serving.cancel()
        await asyncio.wait([serving])


@contextlib.contextmanager
def served_echo(*, thinks: bool = False) -> Iterator[Echo]:
    """The server, until the end of the block. `thinks`: see `Thinking`."""
    echo, ready, stop = Echo(), threading.Event(), asyncio.Event()
    if thinks:
        echo.engine.reasoning_parser, echo.engine.renderer = "think", Thinking()
    thread = threading.Thread(target=lambda: echo.loop.run_until_complete(echo.serve(ready, stop)))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield echo
    finally:
        echo.loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)
        echo.loop.close()
