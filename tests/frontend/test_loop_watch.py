"""What the event loop's lag is, and who is named for it."""

from __future__ import annotations

import asyncio
import errno
import os
import time

import pytest
from waits import FOR_EVER_S, PATIENCE_S

from diptych_frontend.observability import loop_watch
from diptych_frontend.observability.loop_watch import LONG_S, TICK_S, LoopWatch, _place


async def hold_the_loop() -> None:
    time.sleep(LONG_S + 5 * TICK_S)


async def test_who_holds_the_loop_is_named(caplog: pytest.LogCaptureFixture) -> None:
    lags: list[float] = []

    def is_named() -> bool:
        lines = [record.getMessage() for record in caplog.records]
        return any("request 4711, in " in line and "hold_the_loop" in line for line in lines)

    with LoopWatch(lags.append) as watch:
        async with asyncio.timeout(PATIENCE_S):
            while not is_named():  # on a busy machine the watch itself may come too late
                watch.tick()
                await asyncio.create_task(hold_the_loop(), name="request 4711")
                watch.tick()
    assert lags[-1] > LONG_S


async def test_without_a_descriptor_the_task_is_named_still(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pipe", none_left)
    said = "request 4711; its stack cannot be read: Too many open"
    with LoopWatch(lambda lag: None) as watch:
        async with asyncio.timeout(PATIENCE_S):
            while caplog.text.count(said) < 2:  # so it still looks on after the first one
                await asyncio.create_task(hold_the_loop(), name="request 4711")
                watch.tick()


async def test_a_loop_on_time_says_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "TICK_S", FOR_EVER_S)  # so no tick can be late
    lags: list[float] = []
    with LoopWatch(lags.append) as watch:
        watch.tick()
        watch.tick()
    assert lags == [0.0, 0.0]
    assert not caplog.records


DUMP = """Thread 0x00007f0000000002 (most recent call first):
  File "/opt/python3.11/selectors.py", line 468 in select

Current thread 0x00007f0000000003 (most recent call first):
  File "/srv/diptych/frontend/diptych_frontend/observability/loop_watch.py", line 80 in _look_on

Thread 0x00007f0000000001 [MainThread] (most recent call first):
  File "/srv/diptych/.venv/lib/python3.11/site-packages/zmq/sugar/socket.py", line 5 in send
  File "/srv/diptych/frontend/diptych_frontend/core_client/client.py", line 78 in send_frames
  File "/srv/diptych/router/diptych_router/__main__.py", line 69 in main
"""


@pytest.mark.parametrize(
    ("thread", "place"),
    [
        (0x7F0000000001, "diptych_frontend.core_client.client.send_frames:78"),
        (0x7F0000000002, "/opt/python3.11/selectors.py:468 in select"),
        (0x7F0000000004, "no function"),
    ],
    ids=["ours is named before a library's", "none is ours", "it has ended"],
)
def test_the_place_is_the_innermost_function_of_ours(thread: int, place: str) -> None:
    assert _place(thread, DUMP) == place
