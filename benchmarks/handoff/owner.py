"""The process whose blocks are moved: python -m benchmarks.handoff.owner

It offers blocks over a transport, writes them down a plain TCP stream, and lets its memory be read.
"""

from __future__ import annotations

import json
import os
import socket
import threading

import numpy as np
from benchmarks.handoff.shapes import MEMORY_BYTES, Shape

from diptych_kv_transfer.memory.shard import MemoryRegion
from diptych_kv_transfer.signing.references import PUBLIC_KEY
from diptych_kv_transfer.tables.actions import PeerLost, Received
from diptych_kv_transfer.transports.ucx.ucx_transport import UcxTransport

MAX_VECTORS = 1024


def stream(listener: socket.socket, memory: memoryview) -> None:
    """Write the blocks of each shape that is asked for, as fast as the kernel takes them."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while asked := connection.recv(4096):
        views = [memory[at : at + length] for at, length in Shape(*json.loads(asked)).spans()]
        while views:
            sent = connection.sendmsg(views[:MAX_VECTORS])
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]


def main() -> None:
    # UCX logs to standard output: keep that for the description.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    memory = np.full(MEMORY_BYTES, 7, np.uint8)
    region = MemoryRegion.of(memory)
    transport = UcxTransport("127.0.0.1", 0, PUBLIC_KEY)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=stream, args=(listener, memory.data), daemon=True).start()
    description = {
        "pid": os.getpid(), "port": transport.port, "stream_port": listener.getsockname()[1],
        "address": region.address,
    }  # fmt: skip
    print(json.dumps(description), file=answers, flush=True)
    while True:
        for event in transport.poll(None):
            match event:
                case Received(peer, data):
                    tag, *shape = json.loads(data)
                    regions = [region.part(at, n) for at, n in Shape(*shape).spans()]
                    transport.send_blocks(peer, str(tag), tag, regions)
                    transport.send(peer, b"offered")
                case PeerLost():
                    return


if __name__ == "__main__":
    main()
