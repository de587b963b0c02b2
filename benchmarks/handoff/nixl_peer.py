"""NIXL's reads between two processes, one JSON line a shape. Imports nothing of ours.

python nixl_peer.py, with an interpreter that has `nixl` (pip install nixl numpy).
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

MEMORY_BYTES = 384 << 20
BLOCK_KIB = (64, 256, 720, 1024)
COUNTS = (1, 16, 256)
REPETITIONS = 9
POLL_S = 0.0002


def agent(name: str) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def own(pipe: Connection) -> None:
    """Let memory be read until told to stop."""
    ours = agent("owner")
    memory = np.full(MEMORY_BYTES, 7, np.uint8)
    ours.register_memory([(memory.ctypes.data, MEMORY_BYTES, 0, "")], "DRAM", backends=["UCX"])
    pipe.send((ours.get_agent_metadata(), memory.ctypes.data))
    while not pipe.poll(0):
        ours.get_new_notifs()
        time.sleep(POLL_S)


def offsets(size: int, count: int) -> list[int]:
    places = MEMORY_BYTES // size
    return [place * size for place in [*range(0, places, 2), *range(1, places, 2)][:count]]


def main() -> None:
    pipe, other_end = multiprocessing.Pipe()
    owner = multiprocessing.Process(target=own, args=(other_end,), daemon=True)
    owner.start()
    reader = agent("reader")
    memory = np.ones(MEMORY_BYTES, np.uint8)
    reader.register_memory([(memory.ctypes.data, MEMORY_BYTES, 0, "")], "DRAM", backends=["UCX"])
    metadata, theirs = pipe.recv()
    name = reader.add_remote_agent(metadata)
    for kib in BLOCK_KIB:
        for count in COUNTS:
            size = kib << 10
            if size * count > MEMORY_BYTES // 2:
                continue
            places = offsets(size, count)
            sides = [
                reader.prep_xfer_dlist(
                    side, reader.get_xfer_descs([(base + at, size, 0) for at in places], "DRAM")
                )
                for side, base in (("NIXL_INIT_AGENT", memory.ctypes.data), (name, theirs))
            ]
            speeds = [read(reader, sides, count, size * count) for _ in range(REPETITIONS + 1)][1:]
            row = {"block_kib": kib, "count": count, "gb_per_s": statistics.median(speeds)}
            print(json.dumps(row), flush=True)
    pipe.send("stop")
    owner.join(10)


def read(reader: Any, sides: list[Any], count: int, num_bytes: int) -> float:
    """GB/s of one read."""
    indices = np.arange(count)
    started = time.perf_counter()
    handle = reader.make_prepped_xfer("READ", sides[0], indices, sides[1], indices, b"done")
    state = reader.transfer(handle)
    while state == "PROC":
        state = reader.check_xfer_state(handle)
    taken = time.perf_counter() - started
    if state != "DONE":
        raise RuntimeError(f"NIXL says {state}")
    reader.release_xfer_handle(handle)
    return num_bytes / taken / 1e9


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
