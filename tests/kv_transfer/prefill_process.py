"""A prefill engine's end of the hinge in its own process, for tests: one JSON command a line.

python prefill_process.py PORT NUM_BLOCKS BLOCK_BYTES LEASE_SECONDS COMPAT GEOMETRY WHERE LEFT

COMPAT and GEOMETRY are JSON objects; the geometry says how many ranks there are, each with such
blocks. WHERE: `host`, or `device`, whose blocks are copied. LEFT: a list of the leases that it goes
on with, or null.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from engine_kit.copied_memory import CopiedMemory

from diptych_kv_transfer import LeftLease, open_connector
from diptych_kv_transfer.memory.shard import Shard
from diptych_kv_transfer.tables.actions import LeaseEnded
from diptych_protocol import KVTransferConfig

SEED = 20


def main() -> None:
    # UCX logs to standard output: keep that for the answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    port, num_blocks, block_bytes = map(int, sys.argv[1:4])
    compat, geometry = map(json.loads, sys.argv[5:7])
    left = json.loads(sys.argv[8])
    random, shape = np.random.default_rng(SEED), (num_blocks, block_bytes)
    ranks = range(geometry["tensor_parallel_size"])
    memory = [random.integers(0, 256, shape, np.uint8) for _ in ranks]
    connector = open_connector(
        KVTransferConfig(listen_port=port, lease_seconds=float(sys.argv[4])),
        engine_id="prefill",
        epoch=str(os.getpid()),
        compat=compat,
        geometry=geometry,
        kv_memory=[
            Shard.of(part) if sys.argv[7] == "host" else CopiedMemory(part).shard for part in memory
        ],
        left=left and [LeftLease(*fields) for fields in left],
    )
    print(json.dumps({"port": connector.port}), file=answers, flush=True)
    ended: dict[str, str] = {}
    for line in sys.stdin:
        command = json.loads(line)
        answer: object = None
        match command["do"]:
            case "grant":
                answer = connector.grant(
                    command["request"], command["blocks"], command["tokens"], [1], None
                ).to_dict()
            case "lend_a_part":
                blocks, count = command["blocks"], command["count"]
                answer = connector.promise("part", None, len(blocks), command["tokens"], None)
                connector.lend(answer, blocks[:count])
            case "wait_lease_ended":
                deadline = time.monotonic() + command["timeout_s"]
                while command["request"] not in ended and time.monotonic() < deadline:
                    select.select([connector.wake_fd], [], [], deadline - time.monotonic())
                    for event in connector.poll_events():
                        assert isinstance(event, LeaseEnded)
                        ended[event.request_id] = event.outcome
                answer = ended.get(command["request"])
            case "cpu":
                answer = time.process_time()
        print(json.dumps(answer), file=answers, flush=True)
    connector.close()


if __name__ == "__main__":
    main()
