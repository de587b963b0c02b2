"""Engines that compute nothing: what is left of a request's time is the router's.

`python -m benchmarks.instant_core PREFILL_PORT DECODE_PORT` speaks the wire of two EngineCores.
Every request has its whole answer at once; prefill lends blocks that nobody will read. With a third
argument, STEP_MS, decode takes steps of so many milliseconds, and each gives all requests a token.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import msgspec
import zmq

from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineDescription,
    FinishReason,
    SchedulerStats,
    UtilityOutput,
    wire,
)
from diptych_protocol.sampling import POOLING_TASKS

TOKEN = 1000
NUM_BLOCKS = 1 << 16


def description(name: str) -> EngineDescription:
    return EngineDescription(
        engine_id=name, epoch="1", model="smollm2", max_model_len=NUM_BLOCKS * 16, vocab_size=49152,
        block_size=16, num_blocks=NUM_BLOCKS, dtype="float32", compat={}, max_num_seqs=64, pid=0,
        tasks=("generate", *POOLING_TASKS),
        kv_transfer=True, kv_transfer_host="127.0.0.1", kv_transfer_port=1,
    )  # fmt: skip


def answer(request: EngineCoreRequest) -> EngineCoreOutput:
    """All the tokens that it may have."""
    params = request.sampling
    before = len(request.generated_token_ids or ())
    asked = (params.extra_args or {}).get("kv_transfer_params") or {}
    lease: dict[str, Any] | None = None
    if asked.get("do_remote_decode"):
        lease = {
            "do_remote_prefill": True, "remote_engine_id": "prefill", "remote_host": "127.0.0.1",
            "remote_port": 1, "remote_request_id": request.request_id, "remote_block_ids": [[1]],
            "remote_num_tokens": 16, "lease_id": asked.get("lease_id"), "lease_seconds": 30.0,
            "epoch": "1",
        }  # fmt: skip
    return EngineCoreOutput(
        request.request_id, [TOKEN] * ((params.max_tokens or 1) - before),
        finish_reason=FinishReason.LENGTH, kv_transfer_params=lease,
    )  # fmt: skip


def replies(
    name: str, kind: EngineCoreRequestType, payload: list[bytes]
) -> EngineCoreOutputs | None:
    match kind:
        case EngineCoreRequestType.ADD:
            return EngineCoreOutputs(outputs=[answer(wire.request_decoder.decode(payload))])
        case EngineCoreRequestType.UTILITY:
            call = wire.utility_decoder.decode(payload)
            if call.call_id < 0:
                return None
            results: dict[str, Any] = {
                "describe": msgspec.to_builtins(description(name)),
                "stats": SchedulerStats(blocks_total=NUM_BLOCKS, blocks_free=NUM_BLOCKS),
            }
            output = UtilityOutput(call.call_id, result=results.get(call.method))
            return EngineCoreOutputs(utility_output=output)
        case _:
            return None


class Steps:
    """Requests that get a token each step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next = 0.0
        self._left: dict[bytes, dict[str, int]] = {}
        """Tokens to come, by client and request."""

    def add(self, client: bytes, request: EngineCoreRequest) -> None:
        if not self._left:
            self._next = time.monotonic() + self._step_s
        tokens = len(answer(request).new_token_ids)
        self._left.setdefault(client, {})[request.request_id] = tokens

    def wait_ms(self) -> int | None:
        """Until the next step; None: nobody waits for one."""
        if not self._left:
            return None
        return max(0, math.ceil((self._next - time.monotonic()) * 1e3))

    def due(self) -> list[tuple[bytes, EngineCoreOutputs]]:
        """A step's messages, if it is time for one."""
        if not self._left or time.monotonic() < self._next:
            return []
        self._next += self._step_s
        messages = []
        for client, left in list(self._left.items()):
            outputs = []
            for name, tokens in list(left.items()):
                end = FinishReason.LENGTH if tokens == 1 else None
                outputs.append(EngineCoreOutput(name, [TOKEN], finish_reason=end))
                left[name] = tokens - 1
                if end is not None:
                    del left[name]
            messages.append((client, EngineCoreOutputs(outputs=outputs)))
            if not left:
                del self._left[client]
        return messages


def main(ports: dict[str, int], step_s: float | None) -> None:
    """Serve until SIGTERM."""
    context = zmq.Context()
    poller, sockets = zmq.Poller(), {}
    for name, port in ports.items():
        socket = sockets[name] = context.socket(zmq.ROUTER)
        socket.bind(f"tcp://127.0.0.1:{port}")
        poller.register(socket, zmq.POLLIN)
    steps = Steps(step_s or 0.0)
    while True:
        ready = dict(poller.poll(steps.wait_ms()))
        for name, socket in sockets.items():
            if socket not in ready:
                continue
            client, kind, *payload = socket.recv_multipart()
            if name == "decode" and step_s and kind == EngineCoreRequestType.ADD.value:
                steps.add(client, wire.request_decoder.decode(payload))
                continue
            reply = replies(name, EngineCoreRequestType(kind), payload)
            if reply is not None:
                socket.send_multipart([client, *wire.encoder.encode(reply)])
        for client, message in steps.due():
            sockets["decode"].send_multipart([client, *wire.encoder.encode(message)])


if __name__ == "__main__":
    step_ms = float(sys.argv[3]) if len(sys.argv) > 3 else None
    main({"prefill": int(sys.argv[1]), "decode": int(sys.argv[2])}, step_ms and step_ms / 1e3)
