"""Real vLLM servers, where vLLM's CPU build is installed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
from free_ports import free_port
from vllm_kit.environment import ENVIRONMENT, OPTIONS, SERVE, START_S
from waits import PATIENCE_S, wait_until

from diptych_protocol import SchedulerStats
from diptych_router.engines.vllm.metrics import read_metrics


@dataclass
class RealVllm:
    """One server, which serves the name `tiny`."""

    model: str
    log: IO[bytes]
    options: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        command = [
            *SERVE, self.model, "--port", str(self.port), "--served-model-name", "tiny",
            "--num-gpu-blocks-override", "64", *OPTIONS, *self.options,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT, **self.variables},
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def answers(self) -> bool:
        assert self.process.poll() is None, f"vLLM ended while it started: see {self.log.name}"
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=PATIENCE_S).status_code == 200
        return False

    def num_running(self) -> int:
        """Requests that it computes now, as its own gauge says."""
        return self.stats().num_running

    def stats(self) -> SchedulerStats:
        """What its metrics tell now."""
        return read_metrics(httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text).stats

    def kill(self) -> None:
        """At once, with all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def vllm_servers(
    model: str,
    logs: Path,
    number: int,
    *options: str,
    variables: Sequence[dict[str, str]] | None = None,
) -> Iterator[list[RealVllm]]:
    """So many servers, which answer, and end with the block. variables: of each, besides those that
    all have."""
    started: list[RealVllm] = []
    with contextlib.ExitStack() as files:
        try:
            for index in range(number):
                log = files.enter_context((logs / f"vllm-{index}.log").open("wb"))
                started.append(RealVllm(model, log, options, (variables or [{}] * number)[index]))
            for server in started:
                wait_until(server.answers, f"a vLLM server starts ({server.log.name})", START_S)
            yield started
        finally:
            for server in started:
                server.kill()
