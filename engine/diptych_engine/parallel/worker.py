"""A rank of a tensor-parallel group other than the first: a child process of the EngineCore.

`python -m diptych_engine.parallel.worker --config JSON --rank N --directory DIR --parent-pid PID`

It holds its share of the weights and of the KV cache and does what the lead says. It ends with the
lead. If it fails, the lead ends too, because its part of a sum never arrives.
"""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
from pathlib import Path

import msgspec

from diptych_engine.execution.lean_torch import start_lean

if __name__ == "__main__":
    start_lean()  # before the first import of torch

import torch
import zmq

from diptych_engine.execution.placement import choose_device
from diptych_engine.execution.runner import ModelRunner
from diptych_engine.models.shard import Shard
from diptych_engine.parallel.group import SumGroup
from diptych_engine.parallel.steps import (
    FAILED,
    STARTED,
    Answer,
    Kind,
    WorkerCall,
    call_decoder,
    encoder,
    endpoint,
    step_decoder,
)
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.program import die_with_parent, setup_logging
from diptych_protocol import EngineConfig, InvalidRequestError
from diptych_protocol.threads import resolve_struct_types

log = logging.getLogger(__name__)

LAST_WORDS_MS = 2000


class Worker:
    """One rank."""

    def __init__(
        self, config: EngineConfig, rank: int, directory: Path, kv_memory_fd: int | None
    ) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
        self._socket.connect(endpoint(directory, rank))
        self._config = config
        self._kv_memory_fd = kv_memory_fd
        self._device = choose_device(config, rank)
        self._group = SumGroup(rank, config.tensor_parallel_size, directory / "group", self._device)

    def run(self) -> None:
        """Load, join the group, and work until told to stop. Every failure is
        reported to the lead."""
        try:
            source = resolve_model(self._config.model)
            shard = Shard(self._group.rank, self._group.size, self._group.sum_)
            fds = [] if self._kv_memory_fd is None else [self._kv_memory_fd]
            runner = ModelRunner(self._config, source, shard=shard, kv_memory_fds=lambda: fds)
            gc.enable()
            self._answer(Answer(STARTED))
            self._group.join()
            while self._serve_one(runner):
                pass
        except Exception as exc:
            invalid = isinstance(exc, InvalidRequestError)
            self._answer(Answer(FAILED, failure=str(exc) or repr(exc), invalid=invalid))
            raise
        finally:
            self._socket.close()
            self._context.term()

    def _serve_one(self, runner: ModelRunner) -> bool:
        """Do the lead's next bidding; False when that was to stop."""
        kind, *payload = self._socket.recv_multipart()
        match Kind(kind):
            case Kind.STEP:
                step = step_decoder.decode(payload)
                with torch.inference_mode():
                    runner.forward(step.inputs(self._device, runner.loras), step.fresh_blocks)
            case Kind.CALL:
                self._answer(_call(runner, call_decoder.decode(payload)))
            case Kind.STOP:
                return False
        return True

    def _answer(self, answer: Answer) -> None:
        self._socket.send_multipart(encoder.encode(answer))


def _call(runner: ModelRunner, call: WorkerCall) -> Answer:
    try:
        typed = {} if call.arrays is None else {"arrays": call.arrays}
        [result] = runner.collective_rpc(call.method, call.args, call.kwargs | typed)
    except Exception as exc:
        log.info("%s failed", call.method, exc_info=exc)
        invalid = isinstance(exc, InvalidRequestError)
        return Answer(call.call_id, failure=str(exc) or repr(exc), invalid=invalid)
    return Answer(call.call_id, result)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m diptych_engine.parallel.worker")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True, help="private to the group")
    parser.add_argument("--parent-pid", type=int, required=True, help="the lead's process id")
    parser.add_argument("--kv-memory-fd", type=int, help="where the lead reads the KV cache")
    args = parser.parse_args()
    die_with_parent(args.parent_pid)
    resolve_struct_types()
    for number in (signal.SIGINT, signal.SIGTERM):  # the lead says when
        signal.signal(number, signal.SIG_IGN)
    config = msgspec.json.decode(args.config, type=EngineConfig)
    setup_logging(f"{config.engine_id or 'engine'}/{args.rank}")
    try:
        Worker(config, args.rank, args.directory, args.kv_memory_fd).run()
    except Exception:
        log.exception("rank %d cannot go on", args.rank)
        sys.exit(1)


if __name__ == "__main__":
    main()
