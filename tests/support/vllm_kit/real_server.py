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
from prometheus_client.parser import text_string_to_metric_families
from vllm_kit.environment import ENVIRONMENT, OPTIONS, PYTHONPATH, SERVE, START_S, WIRE
from waits import PATIENCE_S, wait_until


@dataclass
class RealVllm:
    """One server, which serves the name `tiny`."""

    model: str
    log: IO[bytes]
    options: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    core_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        command = [
            *SERVE, self.model, "--port", str(self.port), "--served-model-name", "tiny",
            "--num-gpu-blocks-override", "64", *OPTIONS, *WIRE, *self.options,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command,
            env={
                **os.environ,
                **ENVIRONMENT,
                "PYTHONPATH": PYTHONPATH,
                "DIPTYCH_CORE_PORT": str(self.core_port),
                **self.variables,
            },
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    @property
    def address(self) -> str:
        """The address at which routers reach it."""
        return f"127.0.0.1:{self.core_port}"

    @property
    def url(self) -> str:
        """The URL of its own API."""
        return f"http://127.0.0.1:{self.port}"

    def answers(self) -> bool:
        assert self.process.poll() is None, f"vLLM ended while it started: see {self.log.name}"
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=PATIENCE_S).status_code == 200
        return False

    def num_running(self) -> int:
        """Requests that it computes now, as its own gauge says."""
        return int(self.figure("vllm:num_requests_running"))

    def figure(self, name: str) -> float:
        """The sum of a figure of its metrics."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        )

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
