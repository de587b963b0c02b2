"""The client without an event loop: what it cannot read it does not wait for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from engine_kit.fake_core import description
from engine_kit.wire import request
from waits import PATIENCE_S

from diptych_frontend.core_client.launcher import AdoptedCore
from diptych_frontend.core_client.sync_client import SyncCoreClient
from diptych_protocol import EngineCoreOutputs, EngineDeadError, UtilityOutput, wire


@pytest.fixture
def babbling(tmp_path: Path) -> Iterator[str]:
    """The endpoint of a core that says what it is, and then something that is no message."""
    endpoint = f"ipc://{tmp_path}/core"
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
    socket.bind(endpoint)

    def serve() -> None:
        client, _, payload = socket.recv_multipart()
        call = wire.utility_decoder.decode([payload])
        about = UtilityOutput(call.call_id, result=msgspec.to_builtins(description("fake")))
        answer = msgspec.msgpack.encode(EngineCoreOutputs(utility_output=about))
        socket.send_multipart([client, answer])
        socket.recv_multipart()
        socket.send_multipart([client, b"\xc1"])

    thread = threading.Thread(target=serve)
    thread.start()
    yield endpoint
    thread.join(PATIENCE_S)
    socket.close()


def test_an_answer_that_cannot_be_read_is_the_end_of_the_connection(babbling: str) -> None:
    client = SyncCoreClient(AdoptedCore(babbling, os.getpid()), PATIENCE_S)
    try:
        client.add(request("r"))
        with pytest.raises(EngineDeadError, match="cannot be read"):
            client.get_output(PATIENCE_S)
        with pytest.raises(EngineDeadError, match="cannot be read"):
            client.call("stats")
    finally:
        client.close()
