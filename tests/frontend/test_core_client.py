"""What a client of a core knows of the core's end."""

from __future__ import annotations

import asyncio
import shutil
import socket
import struct
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from engine_kit.fake_core import FakeCore
from waits import FOR_EVER_S

from diptych_frontend.core_client import client as module
from diptych_frontend.core_client.client import CoreClient, NotConnectedError, open_dealer
from diptych_frontend.core_client.launcher import socket_folder
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


async def test_nothing_is_sent_down_a_connection_whose_end_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., Awaitable[Any]]
) -> None:
    """ZMQ tells of it before it gives up its pipe. That would swallow a greeting, whose answer
    nobody would miss before its time is over. Here it keeps the pipe for ever."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.PAIR) as told, context.socket(zmq.PAIR) as monitor:
        told.bind("inproc://told")
        monitor.connect("inproc://told")
        monkeypatch.setattr(zmq.Socket, "get_monitor_socket", lambda *_: monitor)
        lost: list[EngineDeadError] = []
        core = FakeCore(f"ipc://{tmp_path}/core")
        client = CoreClient(
            f"ipc://{tmp_path}/core", None, on_outputs=lambda _: None, on_lost=lost.append
        )
        try:
            told.send_multipart([struct.pack("=HI", zmq.EVENT_HANDSHAKE_SUCCEEDED, 0), b""])
            await client.describe()
            told.send_multipart([struct.pack("=HI", zmq.EVENT_DISCONNECTED, 0), b""])
            await eventually(lambda: lost)
            with pytest.raises(NotConnectedError):
                client.tell("describe")
        finally:
            client.close()
            await core.close()


async def test_a_client_hears_of_a_core_that_begins_to_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_POLL_S", FOR_EVER_S)
    endpoint = f"ipc://{tmp_path}/core"
    client = CoreClient(endpoint, None, on_outputs=lambda _: None, on_lost=lambda _: None)
    described = asyncio.create_task(client.describe())
    await asyncio.sleep(0)  # it has found nobody
    core = FakeCore(endpoint)
    try:
        await described
    finally:
        client.close()
        await core.close()


def test_a_core_that_loads_long_on_this_machine_is_looked_for_as_often_as_at_first() -> None:
    """ZMQ would wait twice as long after each attempt: at the end of a start, for a second."""
    with open_dealer("ipc://core", None) as socket:
        assert socket.getsockopt(zmq.RECONNECT_IVL_MAX) == 0


def test_a_long_name_of_the_folder_for_temporary_files_leaves_room_for_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    folder = socket_folder("diptych-ranks-")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "rank-1023"))
    finally:
        shutil.rmtree(folder)
