"""The figures of the live table are asked for while they change, and not while nothing happens."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waits import FOR_EVER_S, Deadline

from diptych.board import watch as watching
from diptych.board.figures import Figures, Pace
from diptych.laptop.rundir import RunState


class Router(http.server.ThreadingHTTPServer):
    """Serves /metrics, and a stream with an event for each `ring`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = self.answered = 0
        self.streams = 0
        self.bell = threading.Semaphore(0)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Router

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            self.server.asked += 1
            text = f"# TYPE r counter\ndiptych:request_success_total {self.server.answered}\n"
            self.wfile.write(text.encode())
            return
        self.server.streams += 1
        while self.server.bell.acquire(timeout=FOR_EVER_S):
            self.wfile.write(b"data: {}\n\n")
            self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


async def until(condition: Callable[[], bool]) -> None:
    deadline = Deadline("the figures of the router")
    while not condition():
        deadline.check()
        await asyncio.sleep(0.02)


@pytest.fixture
def router() -> Iterator[Router]:
    with Router() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.bell.release()
        server.shutdown()


async def test_nobody_asks_while_nothing_happens(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "PERIOD_S", 0.05)
    url = f"http://127.0.0.1:{router.server_address[1]}/v1"
    state = RunState("s", "m", url, ready=True, started_at=0, pid=1, pid_start_s=0)
    told: list[Figures] = []

    def tell(figures: Figures, pace: Pace) -> None:
        told.append(figures)

    router.answered = 6
    task = asyncio.create_task(watching.watch(state, tell))
    try:
        # That is news, so it asks once more, and sees that nothing changes.
        await until(lambda: router.streams == 1 and len(told) == 2)
        idle = router.asked
        await asyncio.sleep(0.5)
        assert router.asked == idle
        router.answered = 7
        router.bell.release()
        await until(lambda: told[-1].answered == 7)
    finally:
        task.cancel()
        await asyncio.wait((task,))
