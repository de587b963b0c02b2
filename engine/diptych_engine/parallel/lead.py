"""The first rank of a tensor-parallel group: a model runner that makes others compute along with
it."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.execution.kv_memory import map_shared
from diptych_engine.execution.placement import choose_device
from diptych_engine.execution.runner import ModelRunner
from diptych_engine.models import StepInputs
from diptych_engine.models.shard import Shard
from diptych_engine.parallel.group import SumGroup
from diptych_engine.parallel.steps import (
    FAILED,
    STARTED,
    Answer,
    Kind,
    StepMessage,
    WorkerCall,
    answer_decoder,
    endpoint,
    frames_of,
)
from diptych_engine.scheduling.request import Pending, StepPlan
from diptych_frontend.core_client.launcher import socket_folder
from diptych_frontend.model_files.model_source import ModelSource
from diptych_frontend.program import python_program
from diptych_protocol import EngineConfig, EngineDeadError, InvalidRequestError, UtilityError
from diptych_protocol.arrays import Frame

START_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 600.0
"""The time limit of the longest call, which loads weights."""
STOP_TIMEOUT_S = 5.0
CAUSE_GRACE_S = 1.0
"""How long the lead waits for the end or the message of a worker that broke a sum."""


class LeadRunner(ModelRunner):
    """Plans, samples and computes its own share, as a single runner does; workers compute the
    others."""

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        kv_memory_fds: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """Start the workers and load the model, each rank its share.

        `kv_memory_fds`: returns a file for each rank's KV, or none; called at once. Raises
        `InvalidRequestError` for a model that cannot be divided so, `EngineDeadError` when a worker
        does not start.
        """
        size = config.tensor_parallel_size
        directory = socket_folder("diptych-ranks-")
        self._call_ids = itertools.count(1)
        self._context = zmq.Context()
        self._workers: list[WorkerProcess] = []
        self._group = SumGroup(0, size, directory / "group", choose_device(config))
        shard = Shard(0, size, self._group.sum_)
        try:
            shard.check(source.config)
            check_hinge(config, choose_device(config))
            given = kv_memory_fds()
            for rank in range(1, size):
                fds = [os.dup(fd) for fd in given[rank : rank + 1]]
                self._workers.append(WorkerProcess(config, rank, directory, self._context, fds))
            super().__init__(config, source, shard=shard, kv_memory_fds=lambda: given)
            deadline = time.monotonic() + START_TIMEOUT_S
            for worker in self._workers:
                worker.answer(STARTED, deadline)
            self._group.join()
        except RuntimeError as exc:
            error = self._cause(exc)
            self.close()
            raise error from exc
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    @property
    def watched(self) -> dict[int, Callable[[], None]]:
        """File descriptors that become readable when a worker has ended, each with a function that
        raises its end."""
        return {worker.ended_fd: worker.raise_if_ended for worker in self._workers}

    def kv_memory(self) -> list[Tensor]:
        """As a single runner's, but for every rank: the hinge of this process serves them all."""
        of_workers = (worker.kv_memory(len(self.kv_cache)) for worker in self._workers)
        return [*super().kv_memory(), *map(torch.from_numpy, of_workers)]

    def launch(self, plan: StepPlan) -> Pending:
        """Launch a step, as a single runner does. Raises `EngineDeadError` when the group is
        broken."""
        try:
            return super().launch(plan)
        except RuntimeError as exc:
            raise self._cause(exc) from exc

    def forward(self, inputs: StepInputs, fresh_blocks: list[int]) -> Tensor:
        self._tell(frames_of(Kind.STEP, StepMessage.of(inputs, fresh_blocks)))
        return super().forward(inputs, fresh_blocks)

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Run a method on every rank at the same time; return the results in the order of the
        ranks.

        A failure is raised after all ranks have answered, that of the lowest rank, with its
        message: `InvalidRequestError` if the caller is at fault.
        """
        named = dict(kwargs or {})
        arrays = named.pop("arrays", None)
        call = WorkerCall(next(self._call_ids), method, list(args), named, arrays)
        self._tell(frames_of(Kind.CALL, call))
        deadline = time.monotonic() + CALL_TIMEOUT_S
        try:
            results = super().collective_rpc(method, args, kwargs)
        finally:
            answers = [worker.answer(call.call_id, deadline) for worker in self._workers]
        for worker, answer in zip(self._workers, answers, strict=True):
            if answer.failure is not None:
                kind = InvalidRequestError if answer.invalid else UtilityError
                raise kind(f"rank {worker.rank}: {answer.failure}")
        return results + [answer.result for answer in answers]

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        for worker in self._workers:
            worker.tell(frames_of(Kind.STOP))
        self._group.leave()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for worker in self._workers:
            worker.stop(max(0.0, deadline - time.monotonic()))
        self._workers = []
        self._context.term()

    def _tell(self, frames: Sequence[Frame]) -> None:
        for worker in self._workers:
            worker.tell(frames)

    def _cause(self, error: RuntimeError) -> EngineDeadError:
        """What broke a sum: a worker that has ended or said why, or else the error itself."""
        ended = [worker.ended_fd for worker in self._workers]
        select.select(ended, [], [], CAUSE_GRACE_S)
        for worker in self._workers:
            cause = worker.how_it_ended()
            if cause is not None:
                return cause
        return EngineDeadError(f"the tensor-parallel group broke: {error}")


def check_hinge(config: EngineConfig, device: torch.device) -> None:
    """Raise `InvalidRequestError` unless the lead can access the workers' KV, if it has to."""
    if config.kv_transfer is not None and device.type != "cpu":
        raise InvalidRequestError(
            "an engine on GPUs with tensor_parallel_size above 1 takes no part in hand-offs: "
            "its ranks' KV is shared on CPUs only",
            param="kv_transfer",
        )


class WorkerProcess:
    """A worker as the lead sees it."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        directory: Path,
        context: zmq.Context[Any],
        shared: list[int],
    ) -> None:
        """shared: the file that its KV cache is in, if there is one already."""
        self.rank = rank
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(endpoint(directory, rank))
        command, environment = python_program(
            "diptych_engine.parallel.worker",
            *("--config", msgspec.json.encode(config).decode()),
            *("--rank", str(rank)),
            *("--directory", str(directory)),
            *("--parent-pid", str(os.getpid())),
        )
        self._shared = shared
        if not shared and config.kv_transfer is not None:  # the hinge needs one
            shared.append(os.memfd_create(f"diptych-kv-{rank}"))
        if shared:
            command += ["--kv-memory-fd", str(shared[0])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=self._shared, env=environment
        )
        self.ended_fd = os.pidfd_open(self._process.pid)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self.ended_fd, zmq.POLLIN)
        self._last_words = ""

    def kv_memory(self, num_blocks: int) -> NDArray[np.uint8]:
        """Return its KV cache, [num_blocks, block_bytes], once it has started; only
        with a hinge."""
        return map_shared(self._shared[0], num_blocks)

    def tell(self, frames: Sequence[Frame]) -> None:
        """Send a message. Does not raise if the worker is gone: the next sum or
        answer will fail."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def answer(self, call_id: int, deadline: float) -> Answer:
        """Wait for the answer to a call.

        Raises `EngineDeadError` if it does not come by `deadline` (monotonic) or the worker ends,
        `InvalidRequestError` if it could not start and the configuration is to blame.
        """
        while True:
            wait_ms = max(0, int((deadline - time.monotonic()) * 1000))
            ready = dict(self._poller.poll(wait_ms))
            if self._socket in ready:
                answer = answer_decoder.decode(self._socket.recv_multipart())
                if answer.call_id == call_id:
                    return answer
                if answer.call_id == FAILED:
                    self._last_words = answer.failure or ""
                    if answer.invalid:
                        raise InvalidRequestError(f"rank {self.rank}: {self._last_words}")
            elif self.ended_fd in ready:
                self.raise_if_ended()
            elif not ready:
                raise EngineDeadError(f"tensor-parallel rank {self.rank} does not answer")

    def raise_if_ended(self) -> None:
        """Raise an error if the process has ended."""
        cause = self.how_it_ended()
        if cause is not None:
            raise cause

    def how_it_ended(self) -> EngineDeadError | None:
        """Return how the process ended; None while it is alive."""
        code = self._process.poll()
        if code is None:
            return None
        while self._socket.poll(0):
            answer = answer_decoder.decode(self._socket.recv_multipart())
            if answer.call_id == FAILED:
                self._last_words = answer.failure or ""
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        words = f": {self._last_words}" if self._last_words else ""
        return EngineDeadError(
            f"tensor-parallel rank {self.rank} (pid {self._process.pid}) {how}{words}"
        )

    def stop(self, timeout_s: float) -> None:
        """Wait for the process to end, and end it if it does not."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()
        for fd in (self.ended_fd, *self._shared):
            os.close(fd)
