"""A transport in its own process, for tests: it does what control messages tell it.

python transport_process.py TRANSPORT MEMORY_BYTES
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

from diptych_kv_transfer.memory.shard import MemoryRegion
from diptych_kv_transfer.signing.references import PUBLIC_KEY
from diptych_kv_transfer.tables.actions import Event, Received, TransferEnded
from diptych_kv_transfer.transports import Transport, transport_named

SEED = 21


def main() -> None:
    # UCX logs to standard output: keep that for the port alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    memory = np.random.default_rng(SEED).integers(1, 256, int(sys.argv[2]), np.uint8)
    transport = transport_named(sys.argv[1])("127.0.0.1", 0, PUBLIC_KEY)
    print(transport.port, file=answers, flush=True)
    while True:
        for event in transport.poll(None):
            act(transport, MemoryRegion.of(memory), event)


def act(transport: Transport, memory: MemoryRegion, event: Event) -> None:
    if isinstance(event, TransferEnded):
        # The key says whom to tell.
        transport.send(int(str(event.key).split()[0]), json.dumps({"ended": event.ok}).encode())
    if not isinstance(event, Received):
        return
    command = json.loads(event.data)
    regions = [memory.part(at, length) for at, length in command.get("spans", [])]
    key = f"{event.peer} {command.get('tag')}"
    match command["do"]:
        case "send":
            transport.send_blocks(event.peer, key, command["tag"], regions)
        case "receive":
            transport.receive_blocks(event.peer, key, command["tag"], regions)
        case "status":
            status = {"cpu": time.process_time(), "name": transport.name}
            transport.send(event.peer, json.dumps(status).encode())


if __name__ == "__main__":
    main()
