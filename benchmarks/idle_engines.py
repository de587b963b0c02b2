"""What idle engines cost a router: it hears their heartbeats, with statistics, twice a second.

    python -m benchmarks.idle_engines --engines 100

The engines are sockets of one other process, half of them prefill engines. Nobody asks for
anything. Processor time is the router's own.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import time
from contextlib import ExitStack

import zmq
from benchmarks.instant_core import NUM_BLOCKS, replies
from benchmarks.scenarios.router import our_router
from benchmarks.servers import free_port, running

from diptych_frontend.core_client.heartbeat_timer import BEAT_S, WITHIN_S
from diptych_protocol import EngineCoreOutputs, EngineCoreRequestType, SchedulerStats, wire
from diptych_protocol.wire import FOLLOW_HEARTBEAT, Heartbeat

SECONDS = 5.0


def serve(ports: list[int]) -> None:
    """Answer what routers ask of new engines, and send heartbeats, until SIGTERM."""
    context, poller = zmq.Context(), zmq.Poller()
    names: dict[zmq.Socket[bytes], str] = {}
    followers: dict[zmq.Socket[bytes], bytes] = {}
    for number, port in enumerate(ports):
        socket = context.socket(zmq.ROUTER)
        socket.bind(f"tcp://127.0.0.1:{port}")
        poller.register(socket, zmq.POLLIN)
        names[socket] = f"engine-{number}"
    next_beat = time.monotonic()
    while True:
        wait_s = max(0.0, next_beat - time.monotonic())
        for socket, _ in poller.poll(math.ceil(wait_s * 1e3)):
            client, kind, *payload = socket.recv_multipart()
            is_call = kind == EngineCoreRequestType.UTILITY.value
            if is_call and wire.utility_decoder.decode(payload).method == FOLLOW_HEARTBEAT:
                followers[socket] = client
            if reply := replies(names[socket], EngineCoreRequestType(kind), payload):
                socket.send_multipart([client, *wire.encoder.encode(reply)])
        if time.monotonic() < next_beat:
            continue
        next_beat += BEAT_S
        for socket, client in followers.items():
            stats = SchedulerStats(blocks_total=NUM_BLOCKS, blocks_free=NUM_BLOCKS)
            beat = EngineCoreOutputs(
                scheduler_stats=stats, heartbeat=Heartbeat(WITHIN_S, adapters=[])
            )
            socket.send_multipart([client, *wire.encoder.encode(beat)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with ExitStack() as stack:
        ports = [free_port() for _ in range(args.engines)]
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(ports,))
        process.start()
        stack.callback(process.join)
        stack.callback(process.terminate)
        half = len(ports) // 2
        router = stack.enter_context(running(our_router(ports[:half], ports[half:])))
        loads = [router.idle_load(SECONDS) for _ in range(args.rounds)]
    print(f"{args.engines} idle engines: {statistics.median(loads):.3f} of a core")
    print(f"each round: {', '.join(f'{load:.3f}' for load in loads)}")


if __name__ == "__main__":
    main()
