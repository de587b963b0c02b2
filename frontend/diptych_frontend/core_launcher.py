"""Starts an EngineCore as a child process and sees to its end."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from diptych_protocol import EngineConfig, EngineDeadError

TERMINATE_GRACE_S = 5.0


@dataclass
class CoreProcess:
    """A core of our own, reached over a socket in a private directory."""

    config: EngineConfig
    public_endpoint: str | None = None
    """A tcp:// endpoint for routers; needs `keys_dir`."""
    keys_dir: Path | None = None
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="diptych-core-"))
        self.endpoint = f"ipc://{self._directory}/core"
        command = [
            *(sys.executable, "-m", "diptych_engine.core_process"),
            *("--config", msgspec.json.encode(self.config).decode()),
            *("--local", self.endpoint),
            *("--parent-pid", str(os.getpid())),
        ]
        if self.public_endpoint is not None:
            command += ["--public", self.public_endpoint, "--keys", str(self.keys_dir)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    async def wait(self) -> EngineDeadError:
        """Return, when the process has ended, what became of it."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        watch = os.pidfd_open(self.process.pid)
        try:
            loop.add_reader(watch, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(watch)
            os.close(watch)
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return EngineDeadError(f"the engine core (pid {self.process.pid}) {how}")

    def unlink(self) -> None:
        """Remove the socket's directory: who is connected stays so, and nobody else can be.

        Nothing is left behind then, however this process ends.
        """
        shutil.rmtree(self._directory, ignore_errors=True)

    def terminate(self) -> None:
        """Ask the process to end; does not wait for it."""
        if self.process.poll() is None:
            self.process.terminate()

    def stop(self, timeout_s: float = TERMINATE_GRACE_S) -> None:
        """End the process: politely first, then not. Safe to call twice."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.unlink()
