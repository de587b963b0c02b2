"""Real vLLM servers, where vLLM's CPU build is installed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
import pytest
from free_ports import free_port
from waits import wait_until

from diptych_router.vllm.metrics import read_metrics

VENV = Path(os.environ.get("DIPTYCH_VLLM", Path(__file__).parents[3] / ".vllm"))
START_S = 900.0
"""A busy machine may need minutes to import vLLM."""

needs_vllm = pytest.mark.skipif(
    not (VENV / "bin" / "vllm").exists(),
    reason="vLLM is not installed: `make vllm` installs it, or DIPTYCH_VLLM names the virtual "
    "environment that has it",
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class RealVllm:
    """One server, which serves the name `tiny`."""

    model: str
    log: IO[bytes]
    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        command = [
            str(VENV / "bin" / "vllm"), "serve", self.model, "--host", "127.0.0.1",
            "--port", str(self.port), "--served-model-name", "tiny", "--dtype", "float32",
            "--max-num-seqs", "16", "--num-gpu-blocks-override", "64", "--enforce-eager",
            *self.options,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT},
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
            return httpx.get(f"{self.url}/health").status_code == 200
        return False

    def num_running(self) -> int:
        """Requests that it computes now, as its own gauge says."""
        return read_metrics(httpx.get(f"{self.url}/metrics").text).stats.num_running

    def kill(self) -> None:
        """At once, with all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def vllm_servers(model: str, logs: Path, number: int, *options: str) -> Iterator[list[RealVllm]]:
    """So many servers, which answer, and end with the block."""
    started: list[RealVllm] = []
    with contextlib.ExitStack() as files:
        try:
            for index in range(number):
                log = files.enter_context((logs / f"vllm-{index}.log").open("wb"))
                started.append(RealVllm(model, log, options))
            for server in started:
                wait_until(server.answers, f"a vLLM server starts ({server.log.name})", START_S)
            yield started
        finally:
            for server in started:
                server.kill()
