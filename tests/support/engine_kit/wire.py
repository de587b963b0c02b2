"""An EngineCore process, and a client of it that speaks the bytes of the wire by hand.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import msgspec
import zmq
from waits import PATIENCE_S

from diptych_protocol import (
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SamplingParams,
    SchedulerStats,
    UtilityCall,
    wire,
)

ADD, ABORT, WAVE, UTILITY, FAILED = (bytes([i]) for i in range(5))
TIMEOUT_MS = int(PATIENCE_S * 1000)


class Client:
    """A DEALER socket, and nothing else."""

    def __init__(self, endpoint: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.call_id = 0

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self) -> EngineCoreOutputs:
        """The next message that says something: a core sends others to find clients that have
        gone."""
        while True:
            assert self.socket.poll(TIMEOUT_MS), "the core does not answer"
            message = wire.outputs_decoder.decode(self.socket.recv_multipart())
            said = msgspec.structs.asdict(message)
            if any(said[field] for field in said.keys() - {"engine_index", "timestamp"}):
                return message

    def call(self, method: str, *args: Any) -> Any:
        self.call_id += 1
        self.send(UTILITY, msgspec.msgpack.encode(UtilityCall(0, self.call_id, method, [*args])))
        while True:
            answer = self.receive().utility_output
            if answer is not None and answer.call_id == self.call_id:
                return answer.failure_message or answer.result

    def add(self, request_id: str, **params: Any) -> None:
        self.send(ADD, msgspec.msgpack.encode(request(request_id, **params)))

    def abort(self, request_ids: list[str]) -> None:
        self.send(ABORT, msgspec.msgpack.encode(request_ids))

    def read(self, request_id: str) -> tuple[list[int], FinishReason | None, str | None]:
        """All tokens of a request, how it ended, and with which error."""
        tokens: list[int] = []
        while True:
            for output in self.receive().outputs:
                assert output.request_id == request_id
                tokens += output.new_token_ids
                if output.finished:
                    return tokens, output.finish_reason, output.error

    def stats(self) -> SchedulerStats:
        return msgspec.convert(self.call("stats"), SchedulerStats)


def request(request_id: str, prompt: list[int] | None = None, **params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 5, **params})
    ids = [1, 2, 3] if prompt is None else prompt
    return EngineCoreRequest(
        request_id, ids, None, sampling, None, None, time.time(), None, None, None
    )


def start(path: str, **changes: Any) -> subprocess.Popen[bytes]:
    """A core with a 2-layer random model and room for 64 blocks."""
    config = EngineConfig(
        **{
            "model": "dummy://?num_hidden_layers=2", "num_blocks": 64, "num_threads": 1,
            "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_num_waiting": 16, **changes,
        }
    )  # fmt: skip
    command = [sys.executable, "-m", "diptych_engine.serving.core_process", "--local", path]
    config_json = msgspec.json.encode(config).decode()
    return subprocess.Popen([*command, "--config", config_json, "--parent-pid", str(os.getpid())])
